"""Integer divisions behind a mask divided what the mask switches off: loads give 0 there. Each such call raised a division by zero, and eager ran it again."""
import pytest
import torch
import torch.nn.functional as F
import vitrify

N = 32771  # a sum in parts of which the last one is not full

QUOTIENTS = {
    "floor": lambda a, b: a // b,
    "remainder": lambda a, b: a % b,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "fmod": lambda a, b: torch.fmod(a, b),
    "of a constant": lambda a, b: 7 // b,
    "of a quotient": lambda a, b: a // (b // (b - b + 1)),
}
REDUCTIONS = {
    "sum": lambda q: q.sum(),
    "rows": lambda q: q.view(1, -1).sum(1),
    "amax": lambda q: q.amax(),
    "amin": lambda q: q.amin(),
    "prod": lambda q: q.prod(),
    "any": lambda q: (q == 1).any(),
    "mean": lambda q: q.double().mean(),
    "var": lambda q: q.double().var(),
}
WRITES = {
    "slice": lambda q, x: (x[3:12].copy_(q[:9]), x * 1, q),
    "slice_scatter": lambda q, x: (torch.slice_scatter(x, q[:9], 0, 3, 12), q),
    "select": lambda q, x: (torch.select_scatter(x.view(10, 3), q[:3], 0, 2), q),
    "pad": lambda q, x: (F.pad(q[:9], (2, 3)), q),
    "cat": lambda q, x: (torch.cat([q[:9], x]) * 2, q),
    "shifted": lambda q, x: F.pad(F.pad(q[:9], (4, 0)), (-2, 5)).view(2, 8).sum(0),
    "diagonal": lambda q, x: torch.diag_embed(q[:9]) + 1,
    "tril": lambda q, x: torch.tril(q[:9].view(3, 3)) + 1,
}
SHAPES = {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", SHAPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("quotient", QUOTIENTS)
def test_sums_in_parts(quotient, reduction, dtype):
    f = lambda a, b: REDUCTIONS[reduction](QUOTIENTS[quotient](a, b))
    a, b = (torch.arange(N) % 200).to(SHAPES[dtype]), (torch.arange(N) % 100 + 1).to(SHAPES[dtype])
    compiled = vitrify.compile(f)
    for _ in range(2):
        torch.testing.assert_close(compiled(a, b), f(a, b))
    assert vitrify.counters["fallbacks"] == vitrify.counters["eager_calls"] == 0


@pytest.mark.parametrize("backend", ["llvm", "interp"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("quotient", QUOTIENTS)
def test_slices(quotient, write, backend):
    f = lambda a, b, x: WRITES[write](QUOTIENTS[quotient](a, b), x)
    a, b = torch.arange(9), torch.arange(1, 10)
    compiled = vitrify.compile(f, options={"backend": backend})
    for _ in range(2):
        x, y = torch.zeros(30, dtype=torch.int64), torch.zeros(30, dtype=torch.int64)
        torch.testing.assert_close(compiled(a, b, x), f(a, b, y))
        assert torch.equal(x, y)
    assert vitrify.counters["fallbacks"] == vitrify.counters["eager_calls"] == 0


@pytest.mark.parametrize("at", [0, 5, N - 1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_what_eager_refuses_is_refused(reduction, at):
    f = lambda a, b: REDUCTIONS[reduction](a // b)
    a, b = torch.arange(N), torch.arange(N) + 1
    compiled = vitrify.compile(f)
    compiled(a, b)
    b[at] = 0
    for g in (f, compiled):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            g(a, b)
