"""A program that asks for the class of a size, or for a comparison of one, gets Python's, whatever stands for it while the program is captured."""
import copy
import fractions
import functools
import math
import numbers
import pickle

import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify


@functools.singledispatch
def kind(n):
    return 3.0


@kind.register
def _(n: int):
    return 5.0


def pair(n):
    return (n, n) if isinstance(n, int) else tuple(n)


def matched(n):
    match n:
        case int():
            return 2.0
        case _:
            return 7.0


PROGRAMS = {
    "int": lambda x: x * (2 if isinstance(x.shape[0], int) else 3),
    "one of several": lambda x: x * (2 if isinstance(x.shape[1] - 1, (str, int)) else 3),
    "no list": lambda x: x * (2 if isinstance(x.shape[0], (list, tuple, float, bool, torch.Tensor, torch.Size)) else 3),
    "__class__": lambda x: x * (2 if x.size(0).__class__ is int else 3),
    "abstract": lambda x: x * (2 if isinstance(x.shape[0], numbers.Integral) else 3) * (2 if isinstance(x.shape[0], numbers.Real) else 3),
    "dispatched": lambda x: x * kind(x.shape[0]),
    "matched": lambda x: x * matched(x.shape[0] * 2),
    "pair": lambda x: F.avg_pool2d(x[None, None], pair(x.shape[0] // 2)),
    "float": lambda x: x * (2 if isinstance(x.shape[0] / 3, float) else 3) * (2 if isinstance(x.shape[0] / 3, int) else 3),
    "comparison": lambda x: x * (2 if (x.shape[0] > 3) is True else 3) * (2 if (x.shape[0] == x.shape[1]) is False else 3),
    "class of a comparison": lambda x: x * (2 if isinstance(x.shape[0] > 3, bool) else 3) * (2 if type(x.shape[0] <= 3) is bool else 3),
    "counted": lambda x: x * sum([x.shape[0] > 3, 5 != x.shape[1], not x.shape[0] >= 9]),
    "found": lambda x: x.masked_select(x > 0.5) * (2 if isinstance(x.masked_select(x > 0.5).shape[0], int) else 3),
    "found compared": lambda x: x[x > 0.5] * (2 if (x[x > 0.5].shape[0] > 1) is True else 3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_asks(name):
    f = PROGRAMS[name]
    for sizes in ([(4, 6)], [(4, 6), (8, 7), (5, 9)]):
        compiled, before = vitrify.compile(f, dynamic=True if len(sizes) == 1 else None), dict(vitrify.counters)
        for size in sizes:
            x = torch.rand(size)
            f(x)  # singledispatch() keeps what it has found
            for _ in range(2):
                torch.testing.assert_close(compiled(x), f(x))
        assert vitrify.counters["kernels_launched"] > before["kernels_launched"]


def test_sizes_stay_symbols():
    """Asking for the class fixes no size."""
    f = lambda x: x * (2 if isinstance(x.shape[0], int) and (x.shape[0] > 2) is True else 3)  # noqa: E731
    compiled = vitrify.compile(f, dynamic=True)
    compiled(torch.rand(4, 6))
    before = vitrify.counters["kernels_built"]
    for n in (5, 9, 17):
        x = torch.rand(n, n + 1)
        assert torch.equal(compiled(x), x * 2)
    assert vitrify.counters["kernels_built"] == before
    assert torch.equal(compiled(torch.rand(2, 6).fill_(1)), torch.full((2, 6), 3.0))


def test_torch_asks():
    """Its own Python code is told of a torch.SymInt, and so are symbolic numbers that are not ours."""
    expects.no_kernels("nothing is compiled")
    assert torch.SymInt.__class__ is type and torch.SymFloat.__class__ is type
    n = torch._C._get_nested_int(1, 1)
    assert type(n) is torch.SymInt and not isinstance(n, int) and n.__class__ is torch.SymInt


def tried(ask):
    """What an error would hide: a program that catches it takes another way than eager, silently."""
    def f(x):
        try:
            said = ask(x.shape[0], x)
        except Exception:
            said = -100.0
        return x * float(said)
    return f


ASKED = {
    "key": lambda n, x: {4: 10.0, 8: 20.0, 5: 30.0}[n], "get": lambda n, x: {4: 10.0}.get(n, 1.0), "in": lambda n, x: 2.0 if n in {4, 5} else 3.0,
    "hash": lambda n, x: float(hash(n)), "made a key": lambda n, x: {n: 5.0}[int(n)], "format": lambda n, x: float(f"{n:03d}"),
    "text": lambda n, x: float(len("{:>7}".format(n))), "and": lambda n, x: n & 6, "or": lambda n, x: 3 | n, "xor": lambda n, x: n ^ x.shape[1],
    "shift": lambda n, x: (n << 2) + (n >> 1) + (1 << n), "invert": lambda n, x: ~n, "plus": lambda n, x: +n, "abs": lambda n, x: abs(n),
    "divmod": lambda n, x: sum(divmod(n, 3)) + sum(divmod(17, n)), "int of a float": lambda n, x: int(n / 2) + int(n * 1.5), "trunc": lambda n, x: math.trunc(n / 3),
    "fraction": lambda n, x: float(fractions.Fraction(n, 3)), "pickled": lambda n, x: pickle.loads(pickle.dumps(n)),
    "copied": lambda n, x: copy.deepcopy([n])[0], "parts": lambda n, x: n.real + n.imag + n.numerator + n.denominator, "bits": lambda n, x: n.bit_length() + n.bit_count(),
    "float": lambda n, x: float(f"{n / 3:.2f}"), "float of a size": lambda n, x: (n / 2).is_integer() + (n / 2).real, "hex": lambda n, x: len((n / 3).hex()),
}


@pytest.mark.parametrize("name", ASKED)
def test_no_error_is_ours(name):
    f = tried(ASKED[name])
    expects.eager("a size that follows from content is not what the plan is for", some=True)
    for compiled, make in ((vitrify.compile(f, dynamic=True), lambda *s: torch.rand(s)), (vitrify.compile(lambda x: f(x[x > 0.5].reshape(-1, 1))), lambda *s: torch.rand(s))):
        for size in ((4, 6), (8, 7), (5, 9)):
            x = make(*size)
            torch.testing.assert_close(compiled(x), f(x) if compiled(x).shape == x.shape else f(x[x > 0.5].reshape(-1, 1)))


@pytest.mark.parametrize("ask", [lambda s: f"{s:.3f}", lambda s: str(+s), lambda s: s.is_integer(), lambda s: s.real, copy.deepcopy, lambda s: s.hex()])
def test_numbers_of_tensors(ask):
    def f(x):
        try:
            said = float(len(str(ask(x.sum().item()))))
        except Exception:
            said = -100.0
        return x * said

    expects.eager("a number that changes from call to call")
    compiled = vitrify.compile(f)
    for x in (torch.ones(3, 4), torch.full((3, 4), 0.25)):
        torch.testing.assert_close(compiled(x), f(x))
