"""Infinities, NaNs and numbers that overflow reach the results that they reach in eager, through each kernel of ours."""
import bounds
import pytest
import torch
import torch.nn.functional as F
import vitrify
from beside import calls_of
from torch import nn

INF, NAN = float("inf"), float("nan")
SPECIAL = {"inf": INF, "-inf": -INF, "nan": NAN, "largest": 3.4e38, "denormal": 1e-42, "-0": -0.0}


def frozen(module):
    torch.manual_seed(0)
    for p in module.parameters():
        p.requires_grad_(False)
    return module.eval()


def same(fn, *makes, op=None, refused=False):
    """For each of the arguments: NaN and infinities where eager has them, the same numbers elsewhere."""
    compiled = vitrify.compile(fn)
    before = dict(vitrify.counters)
    with torch.no_grad():
        for make in makes:
            ours, theirs = compiled(*make()), fn(*make())
            assert ours.stride() == theirs.stride()
            finite = theirs[theirs.isfinite()].abs()
            atol = max(bounds.DEEP_CONVOLUTIONS["atol"], 1e-6 * finite.max().item()) if finite.numel() else 0  # sums round as their largest terms
            torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=bounds.DEEP_CONVOLUTIONS["rtol"], atol=atol)
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    assert did["compiled_calls"] + did["eager_calls"] == len(makes) and (refused or did["eager_calls"] == 0) and did["fallbacks"] == 0
    assert did["compiled_calls"] > 0
    if op:
        assert op in calls_of(compiled)


def with_value(shape, value, *places):
    def make():
        torch.manual_seed(1)
        x = torch.randn(shape)
        for p in places:
            x[p] = value
        return [x]
    return make


CONV = frozen(nn.Conv2d(32, 32, 3, padding=1))
NORM = frozen(nn.BatchNorm2d(32))
NORM.running_mean.normal_()
IMAGE = (1, 32, 12, 13)
PLACES = [[(0, 3, 5, 5)], [(0, 0, 0, 0), (0, 31, 11, 12)], [(0, slice(None), 4, 7)], [(0, 3, 4, 4), (0, 4, 4, 4), (0, 3, 4, 6)], [(0, 7)]]
CHAINS = {
    "alone": lambda x: CONV(x) + 0,
    "relu": lambda x: CONV(x).relu() + 0,
    "sum": lambda x: (CONV(x) + x).relu() + 0,
    "norm": lambda x: NORM(CONV(x)).relu() + 0,
    "twice": lambda x: CONV(CONV(x).relu()) + 0,
}


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="the kernel is for AVX-512")
@pytest.mark.parametrize("program", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("value", SPECIAL.values(), ids=SPECIAL)
def test_three_by_three(program, value):
    plain = with_value(IMAGE, 0.5)
    value = 1e37 if value == 3.4e38 and program is CHAINS["twice"] else value  # sums of what is as large depend on their order
    same(program, plain, *(with_value(IMAGE, value, *p) for p in PLACES), plain, op="vitrify::winograd_convolution")


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="the kernel is for AVX-512")
def test_weights_that_are_not_finite():
    conv = frozen(nn.Conv2d(32, 32, 3, padding=1))
    for value in (INF, NAN, 3e38, 0.0):
        with torch.no_grad():
            conv.weight[3, 4, 1, 1] = value
            conv.weight[5, 4, 0, 2] = value
        same(lambda x: conv(x).relu() + 0, with_value(IMAGE, 1.0), with_value(IMAGE, INF, (0, 4, 3, 3)), op="vitrify::winograd_convolution")


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "one mask": {"attn_mask": "row"},
    "hidden queries": {"attn_mask": "query"},
    "all hidden": {"attn_mask": "all"},
}


def mask_of(kind, queries, keys):
    mask = torch.zeros(queries, keys)
    if kind == "row":
        mask[:, keys // 2:] = -INF
    if kind == "query":
        mask[3] = mask[queries - 1] = -INF
    return mask - INF if kind == "all" else mask


@pytest.mark.sweep(3)
@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("value", SPECIAL.values(), ids=SPECIAL)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("length", [70, 500])
def test_attention(options, value, which, length):
    options = dict(options)
    if isinstance(options.get("attn_mask"), str):
        options["attn_mask"] = mask_of(options["attn_mask"], length, length)

    def make(*places):
        def given():
            torch.manual_seed(1)
            qkv = [torch.randn(1, 2, length, 24) for _ in range(3)]
            for p in places:
                qkv[which][p] = value
            return qkv
        return given
    last, middle = (0, 1, length - 1, 5), (0, 0, length // 2, 3)
    same(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options) + 0, make(), make(last), make(middle), make((0, 0, 40)), make())


LAYER = frozen(nn.Linear(300, 320))


AFTER = pytest.mark.parametrize("after", [lambda y: y + 0, F.relu, F.gelu, F.silu, F.hardswish, torch.sigmoid, torch.tanh, F.hardsigmoid, F.relu6, lambda y: F.leaky_relu(y, 0.1)], ids=range(10))


@pytest.mark.sweep(3)
@AFTER
@pytest.mark.parametrize("value", SPECIAL.values(), ids=SPECIAL)
def test_products(after, value):
    same(lambda x: after(LAYER(x)), *(with_value((rows, 300), value, (rows - 1, 7)) for rows in (1, 33, 100)))


POINT = frozen(nn.Conv2d(32, 32, 1))


@pytest.mark.compiled("a convolution and its post-ops are one call of oneDNN, or ATen's in its place")
@AFTER
@pytest.mark.parametrize("value", SPECIAL.values(), ids=SPECIAL)
def test_post_ops_of_convolutions(after, value):
    value = 1e37 if value == 3.4e38 else value  # sums of what is as large depend on their order
    same(lambda x: after(POINT(x)), with_value((2, 32, 9, 9), value, (0, 3, 5, 5), (1, 4, 0, 0)))


@pytest.mark.parametrize("value", SPECIAL.values(), ids=SPECIAL)
def test_residual_sums(value):
    """The sum is made in the memory of the other operand: the plan gives up a call that meets a NaN, and serves those after it."""
    plain = with_value((2, 32, 9, 9), 0.5, (0, 3, 5, 5))
    for places in [(0, 3, 5, 5)], [(1, 4, 0, 0), (1, 5, 8, 8)]:
        same(lambda x: (POINT(x.sin() + x) + x * 2).relu() + 0, plain, with_value((2, 32, 9, 9), value, *places), plain, refused=True)


def test_finite_numbers_are_computed_once():
    """Sizes that leave lanes empty raise no alarm in the processor."""
    for channels, size in [(32, 9), (17, 5), (8, 1), (3, 31), (64, 7)]:
        conv, layer = frozen(nn.Conv2d(channels, channels + 1, 3, padding=1)), frozen(nn.Linear(301, 303))
        same(lambda x: F.hardswish(conv(x).relu()) + 0, with_value((2, channels, size, size), 0.5))
        same(lambda x: (conv(x)[:, :channels] + x).relu() + 0, with_value((2, channels, size, size), 0.5))
        same(lambda x: F.gelu(layer(x)) + 0, with_value((67, 301), 0.5))


def test_small_products_and_padded_tails():
    weight = torch.randn(17, 19)
    for value in SPECIAL.values():
        same(lambda x: x @ weight, with_value((5, 17), value, (4, 16)), with_value((5, 17), value, (0, 0)))
        same(lambda x: F.layer_norm(x, (19,)) + 0, with_value((7, 19), value, (3, 18)))
        same(lambda x: x.softmax(-1) + 0, with_value((7, 19), value, (3, 18)))
        same(lambda x: x.logsumexp(-1) + 0, with_value((7, 19), value, (3,)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("value", [INF, -INF, NAN, 3e38], ids=str)
@pytest.mark.parametrize("where", ["weight", "bias", "running_mean", "running_var"])
def test_batch_norm(where, value, training, layout):
    """Eager scales and shifts: of an infinite weight it makes NaNs."""
    def net():
        torch.manual_seed(0)
        m = nn.BatchNorm2d(4)
        m.running_mean.normal_()
        getattr(m, where).data[1] = value
        return m.train(training)
    compiled, eager = vitrify.compile(net()), net()
    x = torch.randn(2, 4, 5, 5).contiguous(memory_format=layout)
    with torch.no_grad():
        for _ in range(2):
            ours, theirs = compiled(x), eager(x)
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, equal_nan=True)


FOLDED = [("weight", INF), ("weight", -INF), ("weight", NAN), ("weight", 3e38), ("weight", 0.0), ("bias", INF), ("running_mean", NAN), ("running_mean", -INF), ("running_var", INF), ("running_var", NAN)]


@pytest.mark.compiled("a convolution and what follows it are one call")
@pytest.mark.parametrize("after", [lambda y, x: y, lambda y, x: y.relu(), lambda y, x: y + x], ids=["alone", "relu", "sum"])
@pytest.mark.parametrize("where, value", FOLDED, ids=str)
def test_norms_folded_into_convolutions(where, value, after):
    """Folded weights are products of what is not finite, and make NaNs where eager has infinities; the numbers may change between calls."""
    torch.manual_seed(0)
    conv, norm = frozen(nn.Conv2d(32, 32, 1)), frozen(nn.BatchNorm2d(32))
    compiled = vitrify.compile(lambda x: after(norm(conv(x)), x))
    for number in (value, 0.5, value):
        with torch.no_grad():
            getattr(norm, where)[3] = number
            for make in with_value((2, 32, 9, 9), 1.0), with_value((2, 32, 9, 9), INF, (0, 1, 4, 4)):
                x, = make()
                torch.testing.assert_close(compiled(x), after(norm(conv(x)), x), equal_nan=True, **bounds.DEEP_CONVOLUTIONS)


@pytest.mark.compiled("oneDNN's call, or ATen's in its place")
@pytest.mark.parametrize("net", [
    nn.Sequential(nn.Conv2d(16, 32, 1), nn.Hardswish()),
    nn.Sequential(nn.Conv2d(16, 32, 3, groups=2), nn.Hardswish(), nn.Conv2d(32, 8, 1)),
    nn.Sequential(nn.Linear(128, 256), nn.Hardswish(), nn.Linear(256, 128), nn.Hardswish()),
], ids=["convolution", "two", "linear"])
def test_hardswish_overflows_as_in_eager(net):
    shape = (200, 128) if isinstance(net[0], nn.Linear) else (1, 16, 20, 20)
    first = torch.nn.Sequential(*list(frozen(net))[:2])
    for value in 1e38, 0.5, 6e37, 5e37, -1e38, 0.5:
        same(first, lambda: [torch.full(shape, value)])
        x = torch.full(shape, value)
        with torch.no_grad():
            ours, theirs = vitrify.compile(net)(x), net(x)
        assert torch.equal(ours.isfinite(), theirs.isfinite())


@pytest.mark.compiled("a convolution and what follows it are one call")
@pytest.mark.parametrize("after", [lambda y: y, F.relu, F.hardswish, F.silu], ids=["alone", "relu", "hardswish", "silu"])
@pytest.mark.parametrize("weight, scale, image", [(1e20, 1e30, 1.0), (1e20, 1e-25, 1e19), (1e30, 1e-30, 1e10), (1.0, 1e36, 1e5), (1e25, 0.0, 1e15)])
def test_norms_that_add_nothing(weight, scale, image, after):
    """What is added to channels is zero then, whatever the norm multiplies them by."""
    torch.manual_seed(0)
    conv, norm = frozen(nn.Conv2d(16, 32, 3, bias=False)), frozen(nn.BatchNorm2d(32))
    compiled = vitrify.compile(lambda x: after(norm(conv(x))))
    plain = conv.weight.clone()
    for w, s, v in (1.0, 1.0, 1.0), (weight, scale, image), (1.0, 1.0, 1.0), (weight, 1.0, 1.0), (1.0, scale, image), (1.0, 1.0, 1.0):
        with torch.no_grad():
            conv.weight.copy_(plain).sign_().mul_(w) if w != 1 else conv.weight.copy_(plain)
            norm.weight.fill_(s)
            x = torch.full((2, 16, 9, 9), v)
            ours, theirs = compiled(x), after(norm(conv(x)))
            assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isinf(), theirs.isinf())
            torch.testing.assert_close(ours, theirs, equal_nan=True, **bounds.DEEP_CONVOLUTIONS)


@pytest.mark.compiled("a convolution and what follows it are one call, or ATen's in its place")
@pytest.mark.parametrize("after", [lambda y: y, F.relu, F.silu], ids=["alone", "relu", "silu"])
def test_sums_of_folded_weights_that_overflow(after):
    """Their terms are larger than those of the convolution itself, and may be infinite where the result is not."""
    torch.manual_seed(0)
    conv, norm = frozen(nn.Conv2d(16, 8, 3, bias=False)), frozen(nn.BatchNorm2d(8))
    conv.weight.normal_().mul_(1e8)
    norm.weight.fill_(9e9)
    compiled, infinite = vitrify.compile(lambda x: after(norm(conv(x)))), 0
    x = torch.randn(2, 16, 12, 12)
    with torch.no_grad():
        for k in 0.0, 18.5, 19.1, 0.0, 19.4, 19.7, 20.0, 0.0:
            ours, theirs = compiled(x * 10**k), after(norm(conv(x * 10**k)))
            assert torch.equal(ours.isfinite(), theirs.isfinite()) and torch.equal(ours.isnan(), theirs.isnan())
            infinite += 0 < theirs.isinf().sum() < theirs.numel()
    assert infinite > 2


@pytest.mark.parametrize("channels", [(16, 4), (16, 16), (32, 32)], ids=str)
@pytest.mark.parametrize("value", [INF, NAN])
def test_padding_meets_weights(value, channels):
    """Small images go without a library in eager: zeros around them are multiplied by infinite weights too."""
    conv = frozen(nn.Conv2d(*channels, 3, padding=1))
    conv.weight.data.view(-1)[-1] = value
    for fn in (lambda x: conv(x) * 2, lambda x: conv(x).relu() + 1, lambda x: conv(x.contiguous(memory_format=torch.channels_last)) + 0):
        same(fn, with_value((1, channels[0], 12, 12), 0.5, (0, 0, 0, 0)), with_value((1, channels[0], 12, 12), 0.25, (0, 0, 0, 0)))


WEIGHTS = {"itself": lambda w: w, "a view": lambda w: w.view(-1).view(w.shape), "transposed": lambda w: w.transpose(2, 3), "computed": lambda w: w * 2, "expanded": lambda w: w[:, :, :1].expand(w.shape)}


@pytest.mark.parametrize("after", [lambda y: y + 1, lambda y: F.silu(y) * 2], ids=["plain", "silu"])
@pytest.mark.parametrize("megabytes", [0, 90])
@pytest.mark.parametrize("of", WEIGHTS)
def test_padding_meets_weights_that_are_not_copied(of, megabytes, after):
    """Such a weight stays the same tensor when it is written, whoever writes to it."""
    weight, bias = torch.randn(4, 3, 3, 3), torch.randn(4)
    fn = lambda x: after(F.conv2d(x, WEIGHTS[of](weight), bias, padding=1))  # noqa: E731
    compiled, kinds = vitrify.compile(fn, options={"packed_weight_mb": megabytes}), set()
    for write in (lambda v: None, lambda v: weight.__setitem__((0, 0, 0, 0), v), lambda v: weight.data.__setitem__((0, 0, 0, 0), -v), lambda v: weight.numpy().__setitem__((0, 0, 0, 0), 1.0),
                  lambda v: weight[-1, -1].fill_(v * 0), lambda v: weight.copy_(torch.randn(weight.shape))):
        with torch.no_grad():
            write(INF)
            for x in (torch.randn(1, 3, 4, 5), torch.randn(2, 3, 6, 6)):
                ours, theirs = compiled(x), fn(x)
                kinds.add(bool(theirs.isfinite().all()))
                torch.testing.assert_close(ours, theirs, **bounds.DEEP_CONVOLUTIONS, equal_nan=True)
    assert kinds == {True, False}
