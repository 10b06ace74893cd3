"""Reductions of nothing, reductions that convert first, and bounds that are no numbers or too large: value for value what eager gives, or its error."""
import itertools
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import compare  # noqa: E402

NAN, INF = float("nan"), float("inf")


def outcome(f, x):
    try:
        return f(x), None
    except Exception as e:
        return None, (type(e), str(e).partition("\n")[0])


def same(f, x, native=True):
    """`native`: a plan ran where eager gives a result."""
    want, error = outcome(f, x)
    compiled, before = vitrify.compile(f), dict(vitrify.counters)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            got, ours = outcome(compiled, x)
            assert ours == error
            left, right = compare.flat(got), compare.flat(want)
            assert len(left) == len(right)
            for (where, a), (_, b) in zip(left, right):
                if isinstance(b, torch.Tensor):
                    compare.check_meta(where, a, b)
                    torch.testing.assert_close(a, b, equal_nan=True, msg=where)
                else:
                    assert a == b
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    if error is None and native:
        assert did["compiled_calls"] == 2, did
    vitrify.reset()


def over(op, **more):
    """Of every dim, of all, of several, with and without keepdim."""
    return {f"{op} {d} {k}": (lambda x, d=d, k=k: getattr(torch, op)(x, d, keepdim=k, **more)) for d in (0, 1, (0, 1), None) for k in (False, True) if d is not None}


REDUCTIONS = {}
for op in "sum nansum mean nanmean amax amin logsumexp var std var_mean std_mean all any".split():
    REDUCTIONS |= over(op)
for op in "prod max min argmax argmin median nanmedian mode cumsum cumprod cummax cummin logcumsumexp softmax log_softmax".split():
    REDUCTIONS |= {f"{op} {d}": (lambda x, op=op, d=d: getattr(torch, op)(x, d)) for d in (0, 1)}
for op in "sum nansum prod mean max min argmax argmin all any var std median var_mean count_nonzero amax amin aminmax nanmean norm".split():
    REDUCTIONS[f"{op} of all"] = lambda x, op=op: getattr(torch, op)(x)
REDUCTIONS |= {f"norm {p} {d}": (lambda x, p=p, d=d: torch.linalg.vector_norm(x, p, d)) for p in (0, 1, 2, 3, INF, -INF, -1, -2, 0.5) for d in (0, 1, None)}
REDUCTIONS |= {f"var {c} {d}": (lambda x, c=c, d=d: torch.var(x, d, correction=c)) for c in (0, 1, 5) for d in (0, 1)}
REDUCTIONS |= {
    "logsumexp of no dims": lambda x: torch.logsumexp(x, ()), "sum of no dims": lambda x: x.sum(()), "mean of no dims": lambda x: x.mean(()), "var of no dims": lambda x: x.var(()),
    "amax of no dims": lambda x: x.amax(()), "all of no dims": lambda x: torch.all(x, ()), "norm of no dims": lambda x: torch.linalg.vector_norm(x, 2, ()),
    "softmax then sum": lambda x: torch.softmax(x, 0).sum(), "mse_loss": lambda x: F.mse_loss(x, x),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]), "instance": lambda x: F.normalize(x, dim=0), "cosine": lambda x: F.cosine_similarity(x, x, dim=0),
    "diff": lambda x: torch.diff(x, dim=0), "matmul": lambda x: x.t() @ x, "dist": lambda x: torch.dist(x, x), "topk": lambda x: x.topk(0, 0), "sort": lambda x: x.sort(0),
}


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("eager refuses it", some=True)
@pytest.mark.compiled("there is nothing to compute, or ATen computes it")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REDUCTIONS)
def test_of_nothing(name):
    for sizes, dtype in itertools.product([(0, 3), (3, 0), (0, 0), (0,), (0, 1), (2, 3), (1, 1), ()], [torch.float32, torch.int64, torch.bfloat16, torch.float64, torch.bool]):
        same(REDUCTIONS[name], torch.ones(sizes).to(dtype), native=False)


def test_of_nothing_is_compiled():
    for f in (torch.var_mean, torch.std_mean, torch.sum, torch.mean, torch.prod, torch.var):
        same(f, torch.ones(0, 3))
        same(lambda x: f(x.view(2, 0, 3), 1), torch.ones(0, 3)) if f is not torch.prod else None


INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
VALUES = [1.5, 2.5, -1.5, 0.25, -0.75, 3.0, 100.5, -0.0, 7.9]
CONVERTING = {
    "sum": lambda x, t: x.sum(dtype=t), "sum of a dim": lambda x, t: x.sum(0, dtype=t), "sum keepdim": lambda x, t: x.sum((0, 1), True, dtype=t), "sum of 0-d": lambda x, t: x[0, 0].sum(dtype=t),
    "sum of no dims": lambda x, t: x.sum((), dtype=t), "nansum": lambda x, t: x.nansum(dtype=t), "nansum of a dim": lambda x, t: x.nansum(1, dtype=t), "prod": lambda x, t: x.prod(dtype=t),
    "prod of a dim": lambda x, t: x.prod(1, dtype=t), "mean": lambda x, t: x.mean(dtype=t), "mean of a dim": lambda x, t: x.mean(0, dtype=t), "cumsum": lambda x, t: x.cumsum(0, dtype=t),
    "cumprod": lambda x, t: x.cumprod(1, dtype=t), "softmax": lambda x, t: x.softmax(0, dtype=t), "log_softmax": lambda x, t: x.log_softmax(0, dtype=t),
    "logcumsumexp": lambda x, t: x.logcumsumexp(0),
}


def flat_close(name, f, x):
    want, error = outcome(f, x)
    compiled, before = vitrify.compile(f), dict(vitrify.counters)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for _ in range(2):
            got, ours = outcome(compiled, x)
            assert ours == error, name
            if error is None:
                compare.check_meta(name, got, want)
                if want.is_floating_point():
                    torch.testing.assert_close(got, want, equal_nan=True)
                else:
                    assert torch.equal(got, want), (name, got, want)
    if error is None:
        assert vitrify.counters["compiled_calls"] - before["compiled_calls"] == 2
    vitrify.reset()


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("eager refuses it", some=True)
@pytest.mark.compiled("of nothing, there is nothing to compute; ATen computes complex numbers")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("to", INTS + FLOATS, ids=str)
@pytest.mark.parametrize("name", CONVERTING)
def test_converts_first(name, to):
    op = CONVERTING[name]
    for dtype in FLOATS + [torch.int32, torch.uint8, torch.bool]:
        x = torch.tensor(VALUES * 5).reshape(9, 5)
        x = (x.abs() if dtype is torch.uint8 else x).to(dtype)
        flat_close(f"{name} of {dtype}", lambda x: op(x, to), x)


BOUNDS = [NAN, INF, -INF, 0.0, 1.0, -2.5, 1e30, -1e30, 70000.0, 300, -1, 2**40]


def clamps(lo, hi):
    def made(b, x):
        return None if b is None else torch.full_like(x, b) if x.is_floating_point() or (isinstance(b, int)) else torch.full(x.shape, float(b))
    return {
        "clamp": lambda x: x.clamp(lo, hi), "clamp_": lambda x: x.clone().clamp_(lo, hi), "clip": lambda x: torch.clip(x, lo, hi),
        "tensors": lambda x: torch.clamp(x, made(lo, x), made(hi, x)), "0-d tensors": lambda x: torch.clamp(x, *(None if b is None else torch.tensor(b) for b in (lo, hi))),
        "hardtanh": lambda x: F.hardtanh(x, lo, hi),
    }


@pytest.mark.no_kernels("eager refuses it", some=True)
@pytest.mark.compiled("ATen clamps complex numbers and bools")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("form", sorted(clamps(0, 1)))
def test_clamp(form, dtype):
    pairs = [(b, None) for b in BOUNDS] + [(None, b) for b in BOUNDS] + [(2, 1), (NAN, 1.0), (0.0, NAN), (INF, -INF), (-1e30, 1e30), (0, 1), (0.5, 1.5), (-1, 300), (NAN, NAN)]
    for lo, hi in pairs:
        if form == "hardtanh" and (lo is None or hi is None):
            continue
        x = (torch.arange(40) % 7 - 3).to(torch.float64)
        if dtype.is_floating_point:
            x[3:5] = torch.tensor([NAN, INF])
        f = clamps(lo, hi)[form]
        try:
            same(f, x.to(dtype), native=False)
        except AssertionError as e:
            raise AssertionError(f"{form} {lo} {hi} {dtype}: {e}") from None


NUMBERS = {
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n), "full_like": lambda x, n: torch.full_like(x, n), "fill_": lambda x, n: x.clone().fill_(n), "clamp_min": lambda x, n: torch.clamp_min(x, n),
    "clamp_max": lambda x, n: torch.clamp_max(x, n), "threshold": lambda x, n: F.threshold(x, 0.5, n), "threshold at": lambda x, n: F.threshold(x, n, 1), "leaky_relu": lambda x, n: F.leaky_relu(x, n),
    "add": lambda x, n: x + n, "sub": lambda x, n: n - x, "mul": lambda x, n: x * n, "div": lambda x, n: x / n, "eq": lambda x, n: x == n, "lt": lambda x, n: x < n, 
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n), "addcdiv": lambda x, n: torch.addcdiv(x, x, x, value=n), "lerp": lambda x, n: torch.lerp(x, x + 1, n), "where": lambda x, n: torch.where(x > 0, x, n),
    "nan_to_num": lambda x, n: torch.nan_to_num(x, n), "hardshrink": lambda x, n: F.hardshrink(x, n), "softshrink": lambda x, n: F.softshrink(x, abs(n)), "elu": lambda x, n: F.elu(x, n),
    "celu": lambda x, n: F.celu(x, n), "softplus": lambda x, n: F.softplus(x, n), "softplus threshold": lambda x, n: F.softplus(x, 1, n), "pow": lambda x, n: x ** n, "rpow": lambda x, n: n ** x,
    "pad": lambda x, n: F.pad(x, (1, 1), value=n), "scatter": lambda x, n: x.scatter(0, torch.tensor([0]), n), "index_fill": lambda x, n: x.index_fill(0, torch.tensor([0]), n), "fmod": lambda x, n: torch.fmod(x, n),
    "remainder": lambda x, n: x % n, "floor_divide": lambda x, n: x // n, "maximum": lambda x, n: torch.maximum(x, torch.tensor(n)), "logit": lambda x, n: torch.logit(x, n),
    "new_full": lambda x, n: x.new_full((2,), n), "heaviside": lambda x, n: torch.heaviside(x, torch.tensor(n, dtype=x.dtype)), "tril": lambda x, n: torch.full((2, 2), n, dtype=x.dtype).tril(),
    "index_put": lambda x, n: x.clone().index_put_((torch.tensor([0]),), torch.tensor(n, dtype=x.dtype)), "setitem": lambda x, n: (y := x.clone(), y.__setitem__(0, n), y)[0],
    "arange": lambda x, n: torch.arange(0, 3, 1).to(x.dtype) + n, "fill_diagonal_": lambda x, n: x.repeat(5, 1).fill_diagonal_(n), "copysign": lambda x, n: torch.copysign(x, n), "float_power": lambda x, n: torch.float_power(x, n),
    "bitwise": lambda x, n: x & n, "constant_pad": lambda x, n: F.pad(x, (-1, 2), value=n), "clamp both": lambda x, n: x.clamp(-n, n), "hardtanh": lambda x, n: F.hardtanh(x, -abs(n), abs(n)),
}


@pytest.mark.sweep(5)
@pytest.mark.no_kernels("eager refuses the number", some=True)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", [1e30, 70000.0, -1e39, 300, 2**40, NAN, INF, 0.5], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_do_not_fit(name, number):
    """Eager converts some to the tensor's type, and refuses those too large for it; others it computes with."""
    op = NUMBERS[name]
    number = float(number) if number == 2**40 and name in ("threshold", "hardshrink", "softshrink", "scatter", "index_fill", "hardtanh") else number
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.int8, torch.uint8):
        f = lambda x: op(x, number)  # noqa: E731, B023
        x = torch.tensor([-2, -1, 0, 1, 2]).to(dtype) if dtype is not torch.uint8 else torch.tensor([0, 1, 2, 3, 4], dtype=dtype)
        want, error = outcome(f, x)
        for _ in range(2):
            got, ours = outcome(compiled := vitrify.compile(f), x)
            assert ours == error, (dtype, ours, error)
            if error is None:
                compare.check_meta(f"{dtype}", got, want)
                torch.testing.assert_close(got, want, equal_nan=True, msg=lambda m: f"{dtype}: {m}")  # noqa: B023
        del compiled
        vitrify.reset()


@pytest.mark.parametrize("correction", [1, 2, 2.5, 24, 1000])
@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_warnings_of_too_few_elements(name, correction):
    """ATen warns in each call; a kernel of ours would not."""
    def f(x):
        return getattr(torch, name)(x, (0, 2), correction=correction), x + 1
    compiled, x = vitrify.compile(f), torch.randn(2, 3, 12)
    for g in (compiled, compiled, f):
        with warnings.catch_warnings(record=True) as log:
            warnings.simplefilter("always")
            y = g(x)[0]
        assert [str(w.message).partition(":")[0] for w in log] == [f"{name}()"] * (correction >= 24)
        for a, b in zip(y if isinstance(y, tuple) else [y], f(x)[0] if isinstance(y, tuple) else [f(x)[0]]):
            torch.testing.assert_close(a, b, equal_nan=True)
