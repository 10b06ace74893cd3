"""Sums down columns were one chain of float32 additions of up to 128 elements, where eager adds in runs of 16 or along the lanes of a row: a softmax of a transposed
tensor with many equal elements (dropout's zeros) was seven times as far from fp64 as eager's."""
import pytest
import torch
import vitrify

PROGRAMS = {
    "sum": lambda x: x.sum(2),
    "softmax": lambda x: torch.softmax(x, 2),
    "log_softmax": lambda x: torch.log_softmax(x, 2),
    "mean of squares": lambda x: (x * x).mean(2),
}


def distance(t, exact):
    return ((t.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize("rows", [17, 32, 33, 100, 128, 129, 1000])
@pytest.mark.parametrize("name", PROGRAMS)
def test_columns_of_few_values(name, rows):
    torch.manual_seed(0)
    f = PROGRAMS[name]
    x = torch.where(torch.rand(8, rows, 33) < 0.5, 0.1, torch.randn(8, rows, 33).round()).mT
    compiled = vitrify.compile(f)
    ours, eager, exact = compiled(x), f(x), f(x.double())
    assert ours.stride() == eager.stride()
    assert distance(ours, exact) <= max(1.5 * distance(eager, exact), 2e-7)
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["fallbacks"] == vitrify.counters["eager_calls"] == 0


@pytest.mark.parametrize("rows", [17, 32, 33, 100, 128, 129, 1000])
def test_columns_of_one_value(rows):
    """9.7e-7 off for 128 rows, eager 1.5e-7."""
    x = torch.full((rows, 64), 0.1)
    ours, exact = vitrify.compile(lambda x: x.sum(0))(x), x.double().sum(0)
    assert distance(ours, exact) < 2e-7
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["fallbacks"] == vitrify.counters["eager_calls"] == 0


LONG = [
    ("float32", 300, 2500, lambda x, y: x.sum(0)),
    ("float32", 257, 17, lambda x, y: x.sum(0)),
    ("float32", 1000, 1031, lambda x, y: ((x * y).sum(0), y.sum(0))),
    ("float32", 513, 700, lambda x, y: (x.sum(0) * 2 + 1, x.exp())),
    ("float32", 200, 1025, lambda x, y: (x.sum(0), (x * y).sum(0), (x - y).sum(0), y.mean(0), (y * y).sum(0))),
    ("bfloat16", 300, 1300, lambda x, y: x.float().sum(0)),
    ("float32", 3 * 140, 33, lambda x, y: x.view(3, 140, 33).sum(1)),
]


@pytest.mark.parametrize("dtype, rows, columns, f", LONG, ids=[f"{d}-{r}x{c}-{i}" for i, (d, r, c, _) in enumerate(LONG)])
def test_strips_of_long_columns(dtype, rows, columns, f):
    """Rows and columns that end in the middle of a piece, a strip and a vector; several sums; what is computed beside them and of them."""
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(rows, columns, generator=g).to(getattr(torch, dtype)) for _ in range(2))
    compiled = vitrify.compile(f)
    before = dict(vitrify.counters)
    with torch.no_grad():
        for given in ((x, y), (y, x)):
            ours, wide = compiled(*given), f(*(t.double() for t in given))
            for a, b in zip(ours if isinstance(ours, tuple) else (ours,), wide if isinstance(wide, tuple) else (wide,)):
                scale = b.abs().max()
                assert a.shape == b.shape and (a - b).abs().max() <= 4e-7 * scale
    assert vitrify.counters["kernels_launched"] >= before["kernels_launched"] + 2
