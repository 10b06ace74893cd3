"""Integers computed of sizes are Python's, without an end: those of 64 bits must not wrap in a later call, whose sizes are larger."""
import expects
import pytest
import torch
import vitrify


def power(n, k):
    p = n
    for _ in range(k - 1):
        p = p * n
    return p


FNS = {
    "a power": (lambda x: x + power(x.shape[0], 10) % 7, (3, 4, 5, 100, 6)), "a product": (lambda x: x + x.shape[0] * x.shape[0] * x.shape[0] * 1000003 % 97, (10, 20, 30, 30000)),
    "compared": (lambda x: x + 1 if power(x.shape[0], 9) > 2**40 else x - 1, (3, 4, 300, 5)), "negative": (lambda x: x + (3 - power(x.shape[0], 8)) % 11, (3, 4, 1000, 5)),
    "of what is found": (lambda x: x + power(x[x > 0].numel(), 7) % 11, (3, 4, 2000, 5)), "a float": (lambda x: x * (power(x.shape[0], 5) / 3), (3, 4, 20000, 5)),
}


def fourth(n):
    q = n * n
    return q * q


SUMS = {
    "three": (lambda x: x + (-fourth(x.shape[0]) - fourth(x.shape[0]) - fourth(x.shape[0])) % 7, (3, 4, 5, 46339)), "nine": (lambda x: x + sum([fourth(x.shape[0]) + i for i in range(9)]) % 17, (3, 4, 5, 46339)),
    "a tensor": (lambda x: x + torch.tensor(x.shape[0] * x.shape[0]), (3, 4, 5, 100000)), "a tensor of floats": (lambda x: x + torch.tensor([x.shape[0] * x.shape[0], 1], dtype=torch.float64).sum(), (3, 4, 5, 100000)),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fn", SUMS)
def test_sums_and_tensors(fn, dynamic):
    f, sizes = SUMS[fn]
    expects.eager("of more than 32 bits" if "tensor" in fn else "of more than 64 bits", some=True)
    compiled = vitrify.compile(f, dynamic=dynamic)
    with torch.no_grad():
        for n in sizes:
            x = torch.ones(n, dtype=torch.float64)
            assert torch.equal(compiled(x), f(x)), n


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fn", FNS)
def test_large(fn, dynamic):
    if fn == "of what is found":
        expects.eager("a size that follows from content is not what the plan is for", "computes with an integer of more than 64 bits")
    f, sizes = FNS[fn]
    compiled = vitrify.compile(f, dynamic=dynamic)
    with torch.no_grad():
        for n in sizes:
            x = torch.ones(n, dtype=torch.float64)
            assert torch.equal(compiled(x), f(x)), n


FLOATS = {
    "a sum": lambda x, e: x * ((torch.sym_float(e.shape[0] * e.shape[0]) + 1.0) - torch.sym_float(e.shape[0] * e.shape[0])),
    "compared": lambda x, e: x + (1 if torch.sym_float(e.shape[0] * e.shape[0]) > torch.sym_float(e.shape[0] * e.shape[0] - 1) else 2),
    "a sum of sums": lambda x, e: x * ((torch.sym_float(e.shape[0]) + e.shape[0] * 2.0**51 + 2.0**52) - e.shape[0] * 2.0**51),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("fn", FLOATS)
def test_floats_that_are_rounded_in_a_later_call(fn, dynamic):
    compiled = vitrify.compile(FLOATS[fn], dynamic=dynamic)
    with torch.no_grad():
        for n in (3, 5, 7, 100000001):
            x, e = torch.ones(1, dtype=torch.float64), torch.zeros(1).expand(n)
            assert torch.equal(compiled(x, e), FLOATS[fn](x, e)), n
