"""Numbers and sizes at the edge of what an op takes, and errors whose place in the result nobody reads: values, signs, types and exceptions as eager's."""
import itertools
import warnings

import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify

T, INF, NAN = torch.tensor, float("inf"), float("nan")
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def run(f, args):
    try:
        return f(*args), None
    except Exception as e:
        return None, e


def flat(out):
    return [x for o in out for x in flat(o)] if isinstance(out, (tuple, list)) else [out]


def same(f, *make):
    """Eager's results and inputs, or its error; without an error kernels ran, or only calls where the op has no kernel."""
    ours, eager = ([m.clone() if isinstance(m, torch.Tensor) else m for m in make] for _ in range(2))
    before = dict(vitrify.counters)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (got, error), (want, expected) = run(vitrify.compile(f), ours), run(f, eager)
    assert type(error) is type(expected) and str(error).partition("\n")[0] == str(expected).partition("\n")[0], (error, expected)
    if expected is not None:
        expects.no_kernels("the program raises")
    else:
        assert vitrify.counters["compiled_calls"] > before["compiled_calls"]
        for a, b in zip(flat(got) + ours, flat(want) + eager, strict=True):
            if isinstance(b, torch.Tensor):
                assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
                wide = b.dtype in (torch.float32, torch.float64)  # sums in another order
                torch.testing.assert_close(a, b, rtol=1e-6 if wide else 0, atol=0, equal_nan=True)
    return expected


@pytest.mark.compiled("ATen computes what has too few elements, and warns of it")
@pytest.mark.parametrize("correction", [0, 1, 2])
@pytest.mark.parametrize("name", ["var_mean", "std_mean", "var", "std"])
def test_moments_of_nothing(name, correction):
    for (size, dims), keep, dtype in itertools.product([((0,), [0]), ((3, 0), [0, 1, (0, 1)]), ((2, 0, 3), [1, (0, 2), None])], [False, True], FLOATS):
        for d in dims:
            same(lambda x: getattr(torch, name)(x, dim=d, correction=correction, keepdim=keep), torch.zeros(size, dtype=dtype))


@pytest.mark.parametrize("correction", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.compiled("ATen computes what has too few elements, and warns of it")), -float("inf"), 5, 1.5])
@pytest.mark.parametrize("name", ["var", "std"])
def test_corrections_of_moments(name, correction):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dim, dtype in itertools.product([0, 1, (0, 1)], FLOATS):
            same(lambda x: getattr(torch, name)(x, dim=dim, correction=correction), torch.arange(6.0).view(2, 3).to(dtype))  # noqa: B023


@pytest.mark.parametrize("name", ["sum", "prod", "mean", *(pytest.param(n, marks=pytest.mark.compiled("ATen computes it alone")) for n in ("nansum", "cumsum", "cumprod"))])
def test_a_reduction_converts_first(name):
    x = T([1.5, -2.7, 3.9, 0.5, -0.5, 2.5, 100.7, -3.3])
    for dtype, to in itertools.product([*FLOATS, torch.int8, torch.int64], [*FLOATS, torch.uint8, torch.int16]):
        for dim in ([0, 1] if name.startswith("cum") else [None, 0, 1]):
            if name in ("mean", "prod") and to in (torch.float16, torch.bfloat16):
                continue  # eager rounds in between, farther from fp64
            same(lambda x: getattr(x, name)(dtype=to) if dim is None else getattr(x, name)(dim, dtype=to), x.to(dtype).reshape(2, 4))


@pytest.mark.parametrize("dtype", FLOATS + INTS + [torch.bool], ids=str)
def test_clamp(dtype):
    v = T([1.0, -1.0, NAN, INF, -INF, 0.0, 2.5, 300.0, -129.0, 6e4])
    x = (v if dtype.is_floating_point else v.nan_to_num(3, 100, -100)).to(dtype)
    for kw in [dict(min=NAN), dict(max=NAN), dict(min=NAN, max=1.0), dict(min=1, max=0), dict(min=1e30), dict(max=-1e30), dict(min=INF), dict(min=-INF, max=INF), dict(min=1.5), dict(max=300), dict(min=-200), dict(min=True), dict(min=2**40)]:
        same(lambda x: x.clamp(**kw), x)
        same(lambda x: x.clamp_(**kw), x)
        same(lambda x, o: torch.clamp(x, out=o, **kw), x, torch.zeros_like(x))


@pytest.mark.parametrize("s", [1e30, -1e30, 70000, -70000, INF, NAN, 65504, 0.1])
def test_numbers_that_half_types_do_not_hold(s):
    for dtype, f in itertools.product([torch.float16, torch.bfloat16], [lambda x: F.hardtanh(x, -1, s), lambda x: F.threshold(x, 0, s), lambda x: F.threshold(x, s, 0), lambda x: x.masked_fill(x > 0, s), lambda x: torch.full_like(x, s),
                                                                         lambda x: x.eq(s), lambda x: x.clamp_min(s), lambda x: F.pad(x, (1, 1), value=s)]):
        same(f, T([1.0, -1.0, INF, NAN, 0.0, 3.0], dtype=dtype))
    x = T([0.0, 1.0], dtype=torch.float16)
    assert abs(s) < 65520 or s != s or torch.xlogy(x, abs(s))[1] == INF == vitrify.compile(lambda x: torch.xlogy(x, abs(s)))(x)[1]


def test_bools_are_not_subtracted():
    x = T([1.0, 2.0])
    for f in (lambda x: x - True, lambda x: True - x, lambda x: x - (x > 1), lambda x: (x > 1) - x, lambda x: x.sub_(True), lambda x: (x > 1) - (x > 0), lambda x: torch.rsub(x, True)):
        assert same(f, x) is not None


def test_logsumexp():
    for d, keep, size, v in itertools.product([(), 0, -1, (0, 1), (0, -1)], [False, True], [(4, 3), (1,), (0, 3), (2, 0)], [1.0, INF, -INF, NAN]):
        same(lambda x: torch.logsumexp(x, d, keepdim=keep).isinf().reshape(-1), torch.full(size, v))


CUTS = {
    "slice": lambda r, a: r[:1], "behind": lambda r, a: r[2:], "unused": lambda r, a: a + 1, "select": lambda r, a: r[0], "nothing": lambda r, a: r[:0], "expanded_to_nothing": lambda r, a: r.expand(0, 4), "repeated_never": lambda r, a: r.repeat(0, 1),
    "sum": lambda r, a: (r * 0)[:1].sum(), "flip": lambda r, a: r.flip(0)[:1], "cat": lambda r, a: torch.cat([r[:1], a]), "reshape": lambda r, a: r.reshape(2, 2)[0], "mask": lambda r, a: torch.where(a == a, 0, r), "size": lambda r, a: a + r.shape[0],
    "gather": lambda r, a: r.gather(0, T([0])), "index": lambda r, a: r[T([0, 2])], "index_select": lambda r, a: r.index_select(0, T([0, 2])), "strided": lambda r, a: r.as_strided((2,), (2,)), "diagonal": lambda r, a: r.reshape(2, 2).diagonal(), "tril": lambda r, a: r.reshape(2, 2).tril(-1),
    "float": lambda r, a: r.float().exp()[:1], "two": lambda r, a: (r[:1], a * 2), "unfold": lambda r, a: r.unfold(0, 2, 2)[:1], "pad": lambda r, a: F.pad(r, (0, -3)), "chunk": lambda r, a: r.chunk(2)[0], "copy": lambda r, a: a.copy_(r)[:1],
}
DIVISIONS = {"floor": lambda a, b: a // b, "remainder": lambda a, b: a % b, "fmod": torch.fmod, "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"), "number": lambda a, b: a // 0, "in_place": lambda a, b: a.floor_divide_(b)}


@pytest.mark.parametrize("cut", CUTS)
def test_division_by_zero_is_seen_wherever_it_is(cut):
    for dtype, (name, op) in itertools.product([torch.uint8, torch.int64], DIVISIONS.items()):
        same(lambda a, b: CUTS[cut](op(a, b), a), T([4, 5, 6, 7], dtype=dtype), T([2, 0, 3, 1], dtype=dtype))


LOOKUPS = {"index": lambda x, i: x[i], "index_select": lambda x, i: x.index_select(0, i), "gather": lambda x, i: x.gather(0, i), "take": lambda x, i: x.take(i), "embedding": lambda x, i: F.embedding(i, x.reshape(4, 1)).reshape(-1),
           "index_put": lambda x, i: x.index_put((i,), T(1.0)), "index_add": lambda x, i: x.index_add(0, i, x), "scatter": lambda x, i: x.scatter(0, i, 1.0), "scatter_add": lambda x, i: x.scatter_add(0, i, x)}


@pytest.mark.parametrize("cut", CUTS)
def test_an_index_out_of_range_is_seen_wherever_it_is(cut):
    for i, (name, op) in itertools.product([[1, 9, 0, 0], [0, -9, 0, 0], [0, 0, 0, 4], [3, 2, 1, 0]], LOOKUPS.items()):
        same(lambda x, i: CUTS[cut](op(x, i), x), T([1.0, 2.0, 3.0, 4.0]), T(i))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(3, 4, 4, 1), (3, 4, 16, 16), (2, 4, 5)], ids=str)
def test_group_norm_of_infinite_weights(size, dtype):
    torch.manual_seed(2)
    x, w, b = torch.randn(size, dtype=dtype), T([1.0, INF, -INF, 2.0], dtype=dtype), T([0.5, 0.0, INF, -INF], dtype=dtype)
    for groups in (1, 2, 4):
        ours, eager = (r(lambda x, w, b: [F.group_norm(x, groups, *p) for p in [(w,), (w, b), (None, b), ()]])(x, w, b) for r in (vitrify.compile, lambda f: f))
        for p, q in zip(ours, eager):
            torch.testing.assert_close(p, q, equal_nan=True)


def kinds(t):
    return torch.stack([t.isnan(), t == INF, t == -INF])


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size, channels_last", [((2, 4, 3), False), ((3, 4), False), ((2, 4, 4, 5), False), ((2, 4, 4, 5), True), ((2, 8, 2, 2), True)], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradient_of_group_norm_of_infinities(size, dtype, channels_last, dynamic):
    """Eager adds up products with the input itself, so that infinities of both signs meet where those with the normalised input do not."""
    for groups, weighted in itertools.product((1, 2, 4), (True, False)):
        f = lambda x, *p: F.group_norm(x, groups, *p)
        compiled = vitrify.compile(f, dynamic=dynamic)
        for where, value in itertools.product([(), ("w",), ("g",), ("x",), ("w", "g"), ("g", "w", "g"), ("b",)], (INF, -INF, NAN)):
            torch.manual_seed(1)
            t = {"x": torch.randn(size), "w": torch.randn(size[1]), "b": torch.randn(size[1]), "g": torch.randn(size)}
            for k, n in enumerate(where):
                t[n].view(-1)[-1 - 3 * k] = value if k < 2 else -value
            x, w, b, g = (v.to(dtype, memory_format=torch.channels_last if channels_last and v.dim() == 4 else torch.preserve_format) for v in t.values())
            args = (x, w, b) if weighted else (x,)

            def gradients(h):
                leaves = [v.clone().requires_grad_() for v in args]
                return torch.autograd.grad(h(*leaves), leaves, g)
            before = dict(vitrify.counters)
            ours = gradients(compiled)
            assert vitrify.counters["compiled_calls"] == before["compiled_calls"] + 2 and (vitrify.counters["externs_called"] == before["externs_called"] or dynamic or not weighted)
            for p, q in zip(ours, gradients(f), strict=True):
                assert torch.equal(kinds(p), kinds(q)), (groups, weighted, where, value, p, q)


def test_gradient_of_group_norm_of_a_weight_that_its_scale_makes_infinite():
    x = torch.tensor([[[1.0, 1.0009765625], [2.0, 3.0]]])
    f = lambda x, w, b: F.group_norm(x, 2, w, b)
    compiled = vitrify.compile(f)
    for g in (torch.tensor([[[0.0, 1e-6], [1.0, 2.0]]]), torch.tensor([[[1.0, -1.0], [1e30, 1e38]]])):
        ours, eager = (torch.autograd.grad(h(*leaves), leaves, g) for h in (compiled, f) for leaves in [[v.clone().requires_grad_() for v in (x, T([3e38, 1.0]), T([0.0, 0.0]))]])
        for p, q in zip(ours, eager, strict=True):
            assert torch.equal(kinds(p), kinds(q))


@pytest.mark.parametrize("w", [0, 0.0, 0.25, 0.5, 1, 1.0, 2.0])
def test_signs_of_zeros_of_lerp(w):
    x, y = T([-0.0, 0.0, -0.0, 0.0, 1.0]), T([-0.0, -0.0, 0.0, 0.0, -1.0])
    same(lambda x, y: 1 / torch.lerp(x, y, w), x, y)
    same(lambda x, y, w: 1 / torch.lerp(x, y, w), x, y, torch.full_like(x, w))


@pytest.mark.no_kernels("the program raises", some=True)
@pytest.mark.parametrize("f", [lambda x: x.half().clamp(min=1e30), lambda x: x.half().masked_fill(x > 0, 1e30), lambda x: torch.logsumexp(x, ()), lambda x: x.int().clamp(max=2**40), lambda x: F.threshold(x.half(), 0, 1e30)])
def test_errors_of_numbers_that_nobody_reads(f):
    def unread(x):
        f(x)
        return x + 1
    same(unread, torch.arange(6.0).view(2, 3))


def test_a_number_of_python_keeps_its_place_in_calls():
    x = T(2 + 1j, dtype=torch.complex64)
    ours = vitrify.compile(lambda x: (x * 1j, x - 2.5j, 1j / x, x.real + 1))
    for _ in range(2):
        for a, b in zip(ours(x), (x * 1j, x - 2.5j, 1j / x, x.real + 1), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b)


def test_abs_of_a_number_that_is_read():
    for v in (T([1.5, -4.0]), T([0.0, -0.0]), T([NAN, 1.0])):
        same(lambda x: torch.copysign(x, abs(x.sum().item())) + abs(x.sum().item()), v)


@pytest.mark.parametrize("shape", [(16, 1, 1), (4, 6, 9), (3, 4, 5, 5)])
def test_group_norm_without_weights_of_equal_numbers_is_zero(shape):
    """Eager subtracts the mean first there; scaling first leaves what rounding lost, times 300 where the variance is nothing."""
    def f(x):
        return torch.nn.functional.group_norm(x, 1)
    compiled = vitrify.compile(f)
    for number in (0.1, -1.7, 1e10):
        x = torch.full(shape, number)
        assert torch.equal(compiled(x), f(x)) and not f(x).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_the_largest(dtype, approximate):
    """oneDNN's, which eager runs in contiguous memory, gives NaN for infinity and overflows before that; ATen's own does not."""
    def f(x):
        return torch.nn.functional.gelu(x, approximate=approximate)
    largest = torch.finfo(dtype).max
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), largest, -largest, largest * 0.45, largest / 100, -50.0, 0.0, -0.0]).to(dtype)
    for given in (x, x.repeat(7), x.repeat(4).view(4, 10).t(), x[:1]):
        ours, eager = vitrify.compile(f)(given), f(given)
        assert torch.equal(ours.isnan(), eager.isnan()) and torch.equal(ours.isinf(), eager.isinf())


@pytest.mark.parametrize("program", [lambda x: torch.nn.functional.gelu(x[x > 99]), lambda x: torch.nn.functional.gelu(x)], ids=["found", "given"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_of_one_of_a_size_that_changes(dtype, program):
    """Eager's is oneDNN's but for a single element."""
    f = vitrify.compile(program, dynamic=True)
    for values in ([float("inf"), 1e38, 3.0], [float("inf"), 2.0], [1e38, float("inf"), -1.0, 100.0], [float("inf")], [3.1e38]):
        x = torch.tensor(values).to(dtype)
        ours, eager = f(x), program(x)
        assert torch.equal(ours.isnan(), eager.isnan()) and torch.equal(ours.isinf(), eager.isinf())


ALPHAS = [(torch.int64, 1.0), (torch.int64, 2.0), (torch.int8, 1.5), (torch.float32, True), (torch.float32, 2), (torch.bool, 2), (torch.bool, True), (torch.int64, True)]


@pytest.mark.parametrize("dtype, alpha", ALPHAS, ids=str)
def test_kinds_of_alpha_that_eager_refuses(dtype, alpha):
    x = T([1, 0, 3]).to(dtype)
    for name, other in itertools.product(["add", "sub", "rsub"], [x, T(1).to(dtype), 1]):
        same(lambda x: getattr(torch, name)(x, other, alpha=alpha), x)


VALUES = {"fraction": T(2.5), "nan": T(NAN), "inf": T(INF), "double": T(1e300, dtype=torch.float64), "half": T(6e4, dtype=torch.float16), "thousand": T(1000), "negative": T(-1), "long": T(2**40), "byte": T(200, dtype=torch.uint8),
          "short": T(-300, dtype=torch.int16), "mask": T(True), "largest": T(3.4e38)}


@pytest.mark.parametrize("value", VALUES)
def test_values_that_the_filled_tensor_does_not_hold(value):
    """Eager refuses them: they were converted."""
    for dtype, f in itertools.product([*FLOATS, *INTS, torch.bool], [lambda x, v: x.masked_fill(x > 1, v), lambda x, v: x.clone().masked_fill_(x > 1, v)]):
        same(f, T([1, 0, 2, 3]).to(dtype), VALUES[value])


def test_a_negative_float_is_no_byte():
    for v in (-1, -1.0, 0.0, 255.0):
        same(lambda x: F.pad(x, (1, 1), value=v), T([1, 2], dtype=torch.uint8))


def test_heaviside_takes_one_dtype():
    for a, b in itertools.product([torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16], repeat=2):
        same(torch.heaviside, T([1, 0, 2]).to(a), T([0, 1, 1]).to(b))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("p", [0, 1, 2, 3.5, INF, -INF, -2.0, 0.5])
def test_the_norm_of_one_element_is_its_absolute_value(p, dtype):
    """Nothing is squared: what would overflow or vanish does not."""
    x = T([1e30, -1e-30, 0.0, INF, NAN, -7.0, 60000.0, 1e-7]).to(dtype)
    for size, dim in (((8, 1), 1), ((1, 8, 1), (0, 2)), ((1, 8), 0), ((8, 1), -1)):
        for keep in (False, True):
            same(lambda x: torch.linalg.vector_norm(x, p, dim, keep), x.view(size))
    same(lambda x: torch.linalg.vector_norm(x, p), x[:1])
    same(lambda x: F.normalize(x, dim=1), x.view(8, 1))


NORMED = {"rows": lambda x: x, "image": lambda x: x.unflatten(0, (2, -1)).transpose(1, 2).unsqueeze(-1).contiguous(), "channels_last": lambda x: NORMED["image"](x).to(memory_format=torch.channels_last),
          "strided": lambda x: NORMED["image"](x).expand(-1, -1, -1, 2)}
STATISTICS = {"no variance": ([1.0, 0.0, -1.0], [0.0, 0.0, 0.0], None, 0.0), "infinite weights": ([1.0, 0.0, -1.0], [1.0, 2.0, 3.0], [INF, -INF, INF], 1e-5), "infinite mean": ([INF, -INF, NAN], [1.0, 2.0, 3.0], None, 1e-5),
              "infinite variance": ([1.0, 0.0, 0.0], [INF, -1.0, NAN], [1.0, INF, 0.0], 1e-5), "negative epsilon": ([0.0, 1.0, 0.0], [1.0, 1.0, 0.5], None, -1.0)}


@pytest.mark.parametrize("layout", NORMED)
@pytest.mark.parametrize("statistics", STATISTICS)
def test_batch_norm_of_special_statistics(statistics, layout):
    torch.manual_seed(3)
    mean, var, weight, eps = STATISTICS[statistics]
    weight = None if weight is None else T(weight)
    equal = [torch.full((8, 3), 3.0), T([[1.0, 0.0, -1.0]]).repeat(8, 1)]
    for x in [torch.randn(8, 3)] + equal * (eps == 0):
        for training in (False, True):
            def f(x, m, v):
                return torch.batch_norm(x, weight, None, m, v, training, 0.1, eps, False)
            ours, eager = (r(f)(NORMED[layout](x), T(mean), T(var)) for r in (vitrify.compile, lambda f: f))
            torch.testing.assert_close(ours, eager, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integers_beyond_a_half_type_are_converted_to_it_first(dtype):
    big, half = T([-(2**31), 2**31 - 1, 70000, 5]).to(dtype), T([2.0, 0.5, -3.0, 7.0], dtype=torch.float16)
    for f in (lambda a, b: torch.div(a, b, rounding_mode="floor"), lambda a, b: a * b, lambda a, b: b / a, lambda a, b: torch.addcmul(a, a, b), lambda a, b: torch.addcmul(b, a, b)):
        same(lambda a, b: f(a, b).isfinite(), big, half)


@pytest.mark.no_kernels("the program raises", some=True)
@pytest.mark.parametrize("s", [70000, -70000, 65519, 2**62, 65504, 3])
def test_integers_that_half_does_not_hold(s):
    i, aten = T([1]), torch.ops.aten
    for f in (lambda x: x.scatter(0, i, s), lambda x: x.scatter_(0, i, s), lambda x: x.index_fill(0, i, s), lambda x: F.hardshrink(x, s), lambda x: F.softshrink(x, s), lambda x: torch.constant_pad_nd(x, (1, 1), s),
              lambda x: aten.hardshrink_backward(x, x, s), lambda x: aten.softshrink_backward(x, x, s)):
        same(f, T([1.0, -1.0, 3.0, 0.5], dtype=torch.float16))
        same(lambda x: (f(x), x + 1)[1], T([1.0, -1.0, 3.0, 0.5], dtype=torch.float16))


@pytest.mark.parametrize("beta, threshold", [(70000, 70000), (1, 20), (2, 200), (0.5, 90)])
def test_softplus_whose_exponential_overflows(beta, threshold):
    x = T([1.0, 2.0, -3.0, 0.5, 88.0, 95.0, -30.0, 0.0])
    same(lambda x: torch.ops.aten.softplus_backward(x + 1, x, beta, threshold), x)
    same(lambda x: F.softplus(x, beta, threshold), x)


ROUNDED = {
    "add": lambda x, y, v: torch.add(x, y, alpha=v), "sub": lambda x, y, v: torch.sub(x, y, alpha=v), "rsub": lambda x, y, v: torch.rsub(x, y, alpha=v), "rsub of a number": lambda x, y, v: torch.rsub(x, 3, alpha=v),
    "in place": lambda x, y, v: (x * 1).add_(y, alpha=v), "foreach": lambda x, y, v: torch._foreach_add([x], [y], alpha=v)[0], "pow": lambda x, y, v: x.abs() ** v,
}


@pytest.mark.parametrize("number", [70000, 70000.0, 1e30, 0.1, 1 / 3, 2049, 257, 1e-8, 1e-45, 65519.0, 1e39, 2**40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ROUNDED)
def test_numbers_that_a_half_type_does_not_hold(name, dtype, number):
    """They are rounded to it, and the result once more; beyond the type they are errors."""
    x = T([1.0, -2.0, 0.5, 3.25, 1e-3, 300.0, 0.0, INF, NAN, -0.0, 1e4, 17.0, -INF, 2.0, 1.5, 7.0]).repeat(16).to(dtype)  # eager's vectors: elements left over are rounded once more
    same(lambda x, y: ROUNDED[name](x, y, number), x, x.flip(0).roll(3))


@pytest.mark.parametrize("eps", [1e-8, 1e-45, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bounds_of_logit_that_a_half_type_does_not_hold(dtype, eps):
    x = T([0.0, 1.0, 0.5, -1.0, 2.0, NAN]).to(dtype)
    with torch.no_grad():
        ours, theirs = vitrify.compile(lambda x: torch.logit(x, eps))(x), torch.logit(x, eps)
    assert torch.equal(ours.isinf(), theirs.isinf()) and torch.equal(ours.sign().nan_to_num(7), theirs.sign().nan_to_num(7))


def test_the_reciprocal_of_celus_alpha_is_a_float():
    for dtype in FLOATS:
        same(lambda x: F.celu(x, 1e-45), T([1.0, -1.0]).to(dtype))
        same(lambda x: F.celu(x, 1e-30), T([1.0, -1.0]).to(dtype))


OF_CONSTANTS = {
    "sum": lambda x: x * (T(3.0) + 1).item(), "square root": lambda x: x / T(16.0).sqrt().item(), "copy": lambda x: x + T(3.0).clone().item(), "quotient": lambda x: x * (T(10.0) / T(100.0)).item(),
    "inverse": lambda x: x * (1 / T(64.0).sqrt().item()), "difference": lambda x: x + (T(3.0) - 1).item() - (-T(2.0)).item(), "double": lambda x: x + (T(0.1, dtype=torch.float64) * 3).item(),
    "two": lambda x: x * T(3.0).clone().item() + (T(3.0) * 2).item(), "scalar_tensor": lambda x: x * (torch.scalar_tensor(3.0) * 2).item(),
    "filled": lambda x: x * torch.full((), 3.0).item(), "written": lambda x: x * torch.ones(()).add_(2).item(), "imaginary": lambda x: x * T(1 + 2j).conj().imag.item(),
    "reduced": lambda x: x * torch.arange(5.0).sum().item(), "drawn from a list": lambda x: x * torch.linspace(0, 1, 5)[3].item(), "element": lambda x: x + torch.eye(3)[1, 1].item(),
    "half": lambda x: x * torch.full((), 0.1, dtype=torch.float16).item(), "integer": lambda x: x * torch.arange(5).max().item(), "condition": lambda x: x * 2 if torch.ones(3).any() else x,
}


@pytest.mark.parametrize("name", OF_CONSTANTS)
def test_numbers_of_what_the_program_makes_itself(name):
    """Nothing that changes was among what they are computed of, and nobody computed them: they were 0."""
    same(OF_CONSTANTS[name], torch.linspace(-1, 1, 16))


def test_numbers_of_what_is_written_in_between():
    def f(x):
        s = T(1.0)
        first = s.item()
        s.add_(1)
        return x + s.item() * 10 + first
    same(f, torch.linspace(-1, 1, 16))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("f", [lambda x, a: x * a.item(), lambda x, a: x + 1 if a.item() > 0 else x - 1, lambda x, a: x + (a * 2).item(), lambda x, a: torch.add(x, x, alpha=a.item())], ids=["item", "condition", "product", "alpha"])
def test_numbers_in_tensors_that_are_negated_lazily(f, dtype):
    x = torch.linspace(-1, 1, 16)
    compiled = vitrify.compile(f)
    for value in (2.0, 3.0, -1.0, -4.0):
        given = T(complex(1.0, value), dtype=dtype).conj().imag
        assert given.is_neg()
        torch.testing.assert_close(compiled(x, given), f(x, given))
    held = T(complex(1.0, 2.0), dtype=dtype).conj().imag
    same(lambda x: f(x, held), x)


@pytest.mark.parametrize("name", OF_CONSTANTS)
def test_numbers_of_constants_where_gradients_come_back(name):
    """They are numbers like others, and need no plan that computes them."""
    f = OF_CONSTANTS[name]
    given = [torch.linspace(-1, 1, 16, requires_grad=True) for _ in range(2)]
    for call, x in zip((f, vitrify.compile(f, fullgraph=True)), given):
        call(x).sin().sum().backward()
    torch.testing.assert_close(given[1].grad, given[0].grad)


ORDERS = {"<=": torch.le, "<": torch.lt, ">=": torch.ge, ">": torch.gt}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("outer", ORDERS)
@pytest.mark.parametrize("inner", ORDERS)
def test_nan_between_two_choices(inner, outer, dtype):
    """LLVM folded the second choice of two by one number away, also where the first had let NaN through."""
    x = torch.tensor([float("nan"), 0.5, 2.0, 1.0, float("inf"), -0.0] * 7, dtype=dtype)
    for swapped, negated in itertools.product((False, True), repeat=2):
        def f(x):
            m = ~ORDERS[inner](x, 1.0) if negated else ORDERS[inner](x, 1.0)  # noqa: B023
            v = torch.where(m, *((x, 1.0) if negated else (1.0, x)))  # noqa: B023
            return torch.where(ORDERS[outer](v, 1.0), *((1.0, v) if swapped else (v, 1.0)))  # noqa: B023
        with torch.no_grad():
            torch.testing.assert_close(vitrify.compile(f)(x), f(x), equal_nan=True, rtol=0, atol=0)


PARTS = {"less": lambda x: x[:x.shape[0] - 3], "a quotient": lambda x: x[:x.shape[0] // 4], "steps": lambda x: x[::6]}
NORMS = {"vector_norm": torch.linalg.vector_norm, "norm": lambda x: x.norm(), "of power 3": lambda x: x.norm(3, 0), "of power 2.5": lambda x: torch.linalg.vector_norm(x, 2.5), "foreach": lambda x: torch._foreach_norm([x])[0]}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("part", PARTS)
def test_norms_of_one_number_in_a_later_call(part, norm, dynamic):
    """Of one number eager takes the absolute value: its square would overflow."""
    compiled = vitrify.compile(lambda x: NORMS[norm](PARTS[part](x)), dynamic=dynamic)
    with torch.no_grad():
        for n in (9, 13, 7, 4, 5, 6):
            for number in (1e30, -1e-30, 2.0, float("nan")):
                x = torch.full((n,), number)
                torch.testing.assert_close(compiled(x), NORMS[norm](PARTS[part](x)), equal_nan=True)
