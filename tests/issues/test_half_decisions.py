"""What is decided by a half value sees it as eager stored it: a sign, a zero, an infinity, the edge of a domain, which of two is the larger. In registers it is wider."""
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import compare  # noqa: E402

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
TINY = 1e-7  # of numbers around 0.3: in f16 most products are zero


def drawn(dtype, *sizes, scale=1.0):
    return (torch.randn(*sizes, generator=torch.Generator().manual_seed(3)) * scale).to(dtype)


def same(f, *args):
    with torch.no_grad():
        eager, ours = f(*args), vitrify.compile(f)(*args)
    torch.testing.assert_close(ours, eager, rtol=0, atol=0, equal_nan=True)


DECISIONS = {
    "sign": lambda x: (x * TINY * 0.2).sign(),
    "sgn": lambda x: torch.sgn(x * TINY * 0.2),
    "bool": lambda x: (x * TINY).bool(),
    "logical_not": lambda x: (x * TINY).logical_not(),
    "any": lambda x: (x * TINY).any(-1),
    "any of all": lambda x: (x[:2] * TINY * 0.01).any(),
    "all": lambda x: (x * TINY).all(-1),
    "count_nonzero": lambda x: (x * TINY).count_nonzero(-1),
    "norm 0": lambda x: torch.linalg.vector_norm(x * TINY, 0, -1),
    "norm 0 of one": lambda x: torch.linalg.vector_norm((x * TINY)[..., None], 0, -1),
    "xlogy": lambda x: torch.xlogy(x * TINY * 0.2, x * 0),
    "heaviside": lambda x: torch.heaviside(x * TINY * 0.2, x),
    "isinf": lambda x: (x * x * 3e5).isinf(),
    "frac": lambda x: (x * 30).frac(),
    "floor": lambda x: (x * 3.3).floor(),
    "hardshrink": lambda x: F.hardshrink(x * 0.3, 0.125),
    "hardshrink at its number": lambda x: F.hardshrink(torch.full_like(x, 0.3), 0.3),
    "threshold": lambda x: F.threshold(x * 0.3, 0.125, 9.0),
    "sqrt": lambda x: (x * TINY * 0.2).sqrt().isnan(),
    "log": lambda x: (x * TINY * 0.2).log().isnan(),
    "log1p": lambda x: torch.log1p(-(x * 0.3 / (x * 0.3)) * 1.0001).isnan(),
    "asin": lambda x: torch.asin(torch.ones_like(x) * 1.0001).isnan(),
    "acos": lambda x: torch.acos(torch.ones_like(x) * 1.0001).isnan(),
    "atanh": lambda x: torch.atanh(torch.ones_like(x) * 1.0001).isnan(),
    "erfinv": lambda x: torch.erfinv(torch.ones_like(x) * 1.0001).isnan(),
    "pow": lambda x: ((x * TINY * 0.2) ** 0.7).isnan(),
    "divisor": lambda x: (x * 1e-4 / (x * TINY * 0.2)).isinf(),
    "divisor, with a rounding mode": lambda x: torch.div(x * 1e-4, x * TINY * 0.2, rounding_mode="floor").isinf(),
    "reciprocal": lambda x: ((x * TINY * 0.2).reciprocal() * 1e-7).isinf(),
    "power of -1": lambda x: ((x * TINY * 0.2) ** -1 * 1e-7).isinf(),
    "addcdiv": lambda x: torch.addcdiv(x, x * 1e-4, x * TINY * 0.2).isinf(),
    "argmax": lambda x: (x * 0.01 + 1).argmax(-1),
    "max pooling": lambda x: F.max_pool2d((x * 0.01 + 1)[None], 2, return_indices=True)[1],
    "max pooling of many": lambda x: F.max_pool2d((x * 0.01 + 1)[None], 7, return_indices=True)[1],
}


@HALVES
@pytest.mark.parametrize("f", DECISIONS.values(), ids=DECISIONS.keys())
def test_decisions(f, dtype):
    same(f, drawn(dtype, 64, 300, scale=0.3))


def test_numbers_in_place_of_infinities():
    same(lambda x: torch.nan_to_num(x * x * 300) > 6e4, drawn(torch.float16, 4000, scale=20))


WIDER = {
    "sum as integers": lambda x: (x * 0.3).sum(-1, dtype=torch.int64),
    "sum of all as integers": lambda x: (x * 0.3).sum(dtype=torch.int64),
    "sum of columns as integers": lambda x: (x * 0.3).sum(0, dtype=torch.int32),
    "sum as bytes": lambda x: (x * 0.3).abs().sum(-1, dtype=torch.uint8),
    "product as integers": lambda x: (x * 0.03).prod(-1, dtype=torch.int64),
}


@HALVES
@pytest.mark.parametrize("f", WIDER.values(), ids=WIDER.keys())
def test_sums_in_integers(f, dtype):
    same(f, drawn(dtype, 300, 200, scale=30))


@HALVES
@pytest.mark.parametrize("f", [lambda x: (x * 0.3).mean(-1, dtype=torch.float64), lambda x: torch.linalg.vector_norm(x * 0.3, dim=-1, dtype=torch.float64)], ids=["mean", "norm"])
def test_wider_results_show_what_was_stored(f, dtype):
    x = drawn(dtype, 300, 200, scale=30)
    torch.testing.assert_close(vitrify.compile(f)(x), f(x), rtol=1e-9, atol=1e-12)


@HALVES
@pytest.mark.parametrize("weight", [None, "half", "float"])
def test_statistics_of_half_batches_cancel(dtype, weight):
    """Where the mean is large eager's rounded statistics cancel; what is centred first is as near to what double precision gives, or nearer."""
    x = drawn(dtype, 2, 4, 8, 8) + 1e4
    w = None if weight is None else drawn(dtype if weight == "half" else torch.float32, 4)
    f = lambda x: F.batch_norm(x, None, None, w, training=True)  # noqa: E731
    exact = F.batch_norm(x.double(), None, None, None if w is None else w.double(), training=True)
    compare.check_value("batch_norm", vitrify.compile(f)(x), f(x), exact, elementwise=False)


@HALVES
@pytest.mark.parametrize("f", [lambda y: (y.min(-1).indices, y == 0), lambda y: (y.max(-1).indices, y * 2), lambda y: (y.argmin(-1), y.argmax(0)), lambda y: y.min(-1).indices], ids=["min", "max", "both", "alone"])
def test_ties_of_what_a_kernel_has_stored(f, dtype):
    """It hands on what it stored from its registers, where most of these are not equal."""
    x = drawn(dtype, 40, 30, scale=18)
    program = lambda x: f(x.softmax(-1))  # noqa: E731
    for expected, ours in zip(program(x), vitrify.compile(program)(x)):
        assert torch.equal(ours, expected) or ours.is_floating_point()
