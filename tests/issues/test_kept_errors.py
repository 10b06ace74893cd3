"""What eager raises for the data is raised where nobody reads the result, and where what is at fault is cut away."""
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import compare  # noqa: E402

X = torch.arange(1.0, 13.0).reshape(3, 4)
GOOD, BAD = torch.tensor([1, 2, 0]), torch.tensor([1, 2, 99])
# x is a matrix of 3 by 4; the last of i is out of range, or makes a zero of 99 - i.
OPS = {
    "index": lambda x, i: x[i], "index of two": lambda x, i: x[i, i], "index of a row": lambda x, i: x[:, i], "negative index": lambda x, i: x[-i], "gather": lambda x, i: x.gather(0, i.view(3, 1).expand(3, 4)),
    "index_select": lambda x, i: x.index_select(0, i), "embedding": lambda x, i: F.embedding(i, x), "take": lambda x, i: x.take(i),
    "scatter": lambda x, i: x.scatter(0, i.view(3, 1), x), "scatter of a number": lambda x, i: x.scatter(0, i.view(3, 1), 5.0), "scatter_add": lambda x, i: x.scatter_add(0, i.view(3, 1), x),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i.view(3, 1), x, "amax"), "scatter reduce": lambda x, i: x.scatter(0, i.view(3, 1), x, reduce="add"), "index_add": lambda x, i: x.index_add(0, i, x),
    "index_copy": lambda x, i: x.index_copy(0, i, x), "index_fill": lambda x, i: x.index_fill(0, i, 1.0), "index_put": lambda x, i: x.index_put((i,), x), "index_put of a number": lambda x, i: x.index_put((i,), torch.tensor(1.0)),
    "index_put accumulated": lambda x, i: x.index_put((i,), x, accumulate=True), "index_reduce": lambda x, i: x.index_reduce(0, i, x, "prod"), "put": lambda x, i: x.put(i, x[:, 0]),
    "floor division": lambda x, i: (i + 1) // (99 - i), "division to zero": lambda x, i: torch.div(i + 1, 99 - i, rounding_mode="trunc"), "remainder": lambda x, i: (i + 1) % (99 - i), "fmod": lambda x, i: torch.fmod(i + 1, 99 - i),
    "division of a number": lambda x, i: 7 // (99 - i), "remainder of int32": lambda x, i: (i.int() + 1) % (99 - i.int()), "division by zero": lambda x, i: i // (i.max() - 99), "division by the number zero": lambda x, i: (i + (i > 3)) // 0,
    "nll_loss": lambda x, i: F.nll_loss(x, i, reduction="none"), "nll_loss of all": lambda x, i: F.nll_loss(x, i).view(1), "cross_entropy": lambda x, i: F.cross_entropy(x, i, reduction="none"),
    "embedding_bag": lambda x, i: F.embedding_bag(i.view(3, 1), x), "embedding_bag, max": lambda x, i: F.embedding_bag(i.view(3, 1), x, mode="max"), "multinomial": lambda x, i: torch.multinomial(x - 20.0 * (i.max() > 3), 2),
    "bernoulli": lambda x, i: torch.bernoulli(x / 12 + (i.max() > 3)), "normal": lambda x, i: torch.normal(x, 1.0 - 3.0 * (i.max() > 3).expand(3, 4)), "poisson": lambda x, i: torch.poisson(x - 20.0 * (i.max() > 3)),
    "multi_margin_loss": lambda x, i: F.multi_margin_loss(x, i, reduction="none"), "multilabel": lambda x, i: F.multilabel_margin_loss(x, i.view(3, 1).expand(3, 4), reduction="none"),
    "max_unpool": lambda x, i: F.max_unpool2d(x[:, :1].view(1, 1, 3, 1), i.view(1, 1, 3, 1), (2, 2)), "setitem": lambda x, i: (y := x.clone(), y.__setitem__(i, 1.0), y)[0],
    "svd": lambda x, i: torch.linalg.svdvals(x * torch.where(i.max() > 3, float("nan"), 1.0)),
    "masked_scatter": lambda x, i: x.masked_scatter(x + 20 * (i.max() > 3) > 10, x.view(-1)[:4]), "repeat_interleave": lambda x, i: x.repeat_interleave(i.clamp(max=3) - 4 * (i > 3), 0, output_size=3),
}
# What is left of it.
READS = {
    "nothing": lambda r: None, "the first": lambda r: r[:1], "the first, computed with": lambda r: (r * 2 + 1)[:1], "one element": lambda r: r.reshape(-1)[0], "the first, summed": lambda r: (r * 2)[:1].sum(),
    "every second": lambda r: r[::2][:1] * 2, "a part of a copy": lambda r: r.clone().view(-1)[:1] * 2, "split": lambda r: (r * 3).split(1)[0] + 1, "unbound": lambda r: (r * 3).unbind(0)[0], "a gathered one": lambda r: (r * 2)[torch.tensor([0])],
    "padded away": lambda r: F.pad(r * 2, (0, -1)) if r.dim() == 1 else F.pad(r * 2, (0, 0, 0, -1)) if r.dim() == 2 else None, "overwritten": lambda r: (y := r * 2, y.fill_(3), y)[2], "zeros like it": lambda r: torch.zeros_like(r),
    "its size": lambda r: torch.ones(r.shape[0]), "whole": lambda r: r * 2, "sum": lambda r: r.sum(), "one row of a softmax": lambda r: (r.float() + 1).softmax(-1).reshape(-1)[:1],
    "narrowed": lambda r: torch.cat([r, r])[:1] * 2, "as a mask": lambda r: torch.where(r > 1, r, r)[:1], "transposed": lambda r: (r * 2).t()[:, :1] if r.dim() == 2 else (r * 2)[:1],
}


def outcome(f, *args):
    torch.manual_seed(3)
    try:
        return f(*args), None, torch.get_rng_state()
    except Exception as e:
        return None, (type(e), str(e).partition("\n")[0]), torch.get_rng_state()


@pytest.mark.sweep(4)
@pytest.mark.no_kernels("the program raises", some=True)
@pytest.mark.compiled("ATen computes some of these alone")
@pytest.mark.eager("recorded ", some=True)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", OPS)
def test_errors_of_data(name, read, grad):
    op, use = OPS[name], READS[read]

    def f(x, i, w):
        r = op(x * 2 - x, i)
        return use(r), x + 1 + w
    compiled, w = vitrify.compile(f), torch.ones(3, 4, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        for i in (GOOD, BAD, GOOD, BAD):
            ours, eager = outcome(compiled, X.clone(), i, w), outcome(f, X.clone(), i, w)
            assert ours[1] == eager[1]
            for (where, a), (_, b) in zip(compare.flat(ours[0]), compare.flat(eager[0])):
                if isinstance(b, torch.Tensor):
                    compare.check_meta(where, a, b)
                    torch.testing.assert_close(a, b, equal_nan=True)
            assert torch.equal(ours[2], eager[2])
            if i is BAD:
                assert eager[1] is not None


@pytest.mark.parametrize("name", ["index", "gather", "embedding", "floor division", "remainder", "scatter_add", "nll_loss", "take", "embedding_bag"])
def test_it_is_compiled(name):
    op = OPS[name]
    f = vitrify.compile(lambda x, i: (op(x * 2, i)[:1] * 2, x + 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(X, GOOD)
        with pytest.raises((RuntimeError, IndexError)):
            f(X, BAD)
        f(X, GOOD)
    assert vitrify.counters["compiled_calls"] == 2 and vitrify.counters["fallbacks"] == 0


def test_what_cannot_fault_is_not_kept():
    """Reads of all elements need no copy of their own, and unused work without faults goes."""
    def f(w, i, x):
        (x * 3).exp()
        return F.layer_norm(F.embedding(i, w) + 1, (4,))
    compiled = vitrify.compile(f)
    with torch.no_grad():
        compiled(X, GOOD, X)
    before = dict(vitrify.counters)
    with torch.no_grad():
        compiled(X, GOOD, X)
    assert vitrify.counters["kernels_launched"] - before["kernels_launched"] == 1


TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
POOLS = {
    "avg_pool1d": lambda x: F.avg_pool1d(x[0, 0], 2), "avg_pool2d": lambda x: F.avg_pool2d(x[0], 2), "avg_pool3d": lambda x: F.avg_pool3d(x, 2), "max_pool2d": lambda x: F.max_pool2d(x[0], 2),
    "max_pool3d": lambda x: F.max_pool3d(x, 2), "adaptive_avg_pool1d": lambda x: F.adaptive_avg_pool1d(x[0, 0], 2), "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x[0], 3), "adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x, 3),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x[0], 3), "nearest": lambda x: F.interpolate(x, scale_factor=2), "bilinear": lambda x: F.interpolate(x[0], scale_factor=2, mode="bilinear"), "trilinear": lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
    "bicubic": lambda x: F.interpolate(x[0], scale_factor=2, mode="bicubic"), "linear": lambda x: F.interpolate(x[0, 0], scale_factor=2, mode="linear"), "replicate": lambda x: F.pad(x[0], (1, 1, 1, 1), mode="replicate"),
    "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1), "logsumexp": lambda x: x.logsumexp(-1), "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]), "group_norm": lambda x: F.group_norm(x, 1), "gelu": F.gelu, "silu": F.silu, "mish": F.mish,
    "relu": F.relu, "relu6": F.relu6, "elu": F.elu, "selu": F.selu, "celu": F.celu, "softplus": F.softplus, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid, "hardtanh": F.hardtanh, "leaky_relu": F.leaky_relu, "logsigmoid": F.logsigmoid, "softshrink": F.softshrink,
    "hardshrink": F.hardshrink, "glu": F.glu, "prelu": lambda x: F.prelu(x, torch.ones(1, dtype=x.dtype)), "threshold": lambda x: F.threshold(x, 1, 2), "mean": torch.mean, "var": torch.var, "std": torch.std, "norm": torch.norm, "vector_norm": torch.linalg.vector_norm,
    "prod": torch.prod, "sum": torch.sum, "cumsum": lambda x: x.cumsum(0), "amax": torch.amax, "aminmax": torch.aminmax, "argmax": torch.argmax, "max of a dim": lambda x: x.max(0), "sign": torch.sign, "abs": torch.abs, "neg": torch.neg, "floor": torch.floor, "round": torch.round,
    "frac": torch.frac, "trunc": torch.trunc, "exp": torch.exp, "reciprocal": torch.reciprocal, "lgamma": torch.lgamma, "erfinv": torch.erfinv, "logit": torch.logit, "square": torch.square, "bitwise_not": torch.bitwise_not, "lerp": lambda x: torch.lerp(x, x, 0.5),
    "addcmul": lambda x: torch.addcmul(x, x, x), "addcdiv": lambda x: torch.addcdiv(x, x, x), "clamp": lambda x: x.clamp(0, 1), "sub": lambda x: x - x, "pow": lambda x: x**2, "atan2": lambda x: torch.atan2(x, x), "hypot": lambda x: torch.hypot(x, x), "copysign": lambda x: torch.copysign(x, x),
    "nextafter": lambda x: torch.nextafter(x, x), "fmod": lambda x: torch.fmod(x + 1, x + 1), "remainder": lambda x: torch.remainder(x + 1, x + 1), "logaddexp": lambda x: torch.logaddexp(x, x), "xlogy": lambda x: torch.xlogy(x, x), "heaviside": lambda x: torch.heaviside(x, x), "fmax": lambda x: torch.fmax(x, x),
    "maximum": lambda x: torch.maximum(x, x), "shift": lambda x: x << 1, "mse_loss": lambda x: F.mse_loss(x, x), "l1_loss": lambda x: F.l1_loss(x, x), "smooth_l1": lambda x: F.smooth_l1_loss(x, x), "huber": lambda x: F.huber_loss(x, x), "bce": lambda x: F.binary_cross_entropy(x.clamp(0, 1), x.clamp(0, 1)),
    "kl_div": lambda x: F.kl_div(x, x, reduction="sum"), "nan_to_num": torch.nan_to_num, "tril": lambda x: x.tril(), "batch_norm": lambda x: F.batch_norm(x, None, None, training=True), "local_response_norm": lambda x: F.local_response_norm(x, 2), "pixel_shuffle": lambda x: F.pixel_shuffle(x.expand(1, 4, 4, 4, 4)[0].transpose(0, 1), 2),
    "nll_loss": lambda x: F.nll_loss(x[0, 0, 0], torch.tensor([0, 1, 2, 3])), "logical_and": lambda x: torch.logical_and(x, x), "rsub": lambda x: 1 - x, "one_hot": lambda x: F.one_hot(x, 5), "one_hot of a row": lambda x: F.one_hot(x, 2)[:1],
}


@pytest.mark.sweep(5)
@pytest.mark.eager("Expected input tensor to have an integral dtype", some=True)
@pytest.mark.no_kernels("eager refuses these types", some=True)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_types_that_eager_refuses(name, dtype):
    """Whatever the kernels here could do."""
    op = POOLS[name]
    x = (torch.arange(64).reshape(1, 1, 4, 4, 4) % 5).to(dtype)
    f = lambda x: op(x)  # noqa: E731
    with torch.no_grad():
        eager = outcome(f, x)
        ours = outcome(vitrify.compile(f), x)
    assert ours[1] == eager[1]


DEAD = {
    "one_hot": lambda x, k: F.one_hot(k - 9, 3), "one_hot, few classes": lambda x, k: F.one_hot(k + 9, 3), "bincount": lambda x, k: torch.bincount(k - 9),
    "binary_cross_entropy": lambda x, k: F.binary_cross_entropy(x - 7, x), "histc": lambda x, k: torch.histc(x / 0), "histogram": lambda x, k: torch.histogram(x * float("nan"), 3),
    "searchsorted": lambda x, k: torch.searchsorted(x, x, sorter=k.repeat(3) + 99), "lu_unpack": lambda x, k: torch.lu_unpack(x[:4].reshape(2, 2), (k + 9).int()),
    "ctc_loss": lambda x, k: F.ctc_loss(torch.zeros(6, 1, 5) + x.mean(), torch.tensor([[1, 2]]), torch.tensor([6]), k[:1] - 8),
    "clamp of no halves": lambda x, k: x[:0].half().clamp(min=1e30), "clamp of no bytes": lambda x, k: x[:0].to(torch.int8).clamp(min=1000), "fill of no halves": lambda x, k: x[:0].half().fill_(1e30),
    "sum of no halves": lambda x, k: x[:0].half().add(x[:0].half(), alpha=1e30), "softshrink of no halves": lambda x, k: F.softshrink(x[:0].half(), 1e30), "threshold of no halves": lambda x, k: F.threshold(x[:0].half(), 1.0, 1e30),
}


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("the program raises")
@pytest.mark.compiled("the program raises")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", DEAD)
def test_library_calls_that_nobody_reads_may_raise(name, mode, dynamic):
    """Of an op that no table row describes nobody knows which values it takes: it runs though nobody reads it. Numbers that a type cannot hold are refused for no elements too."""
    def program(x, k):
        DEAD[name](x, k)
        return x.exp()
    compiled = vitrify.compile(program, dynamic=dynamic)
    with mode():
        for _ in range(2):
            _, error, state = outcome(program, X[0].repeat(2)[:6].clone(), torch.tensor([0, 1]))
            _, mine, mine_state = outcome(compiled, X[0].repeat(2)[:6].clone(), torch.tensor([0, 1]))
            assert mine == error and torch.equal(state, mine_state)
            assert error
