"""Autocast casts what a composite op is made of also where autograd does not take it apart: in inference mode, and for tensors that were made there."""
import bounds
import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify

PROGRAMS = {
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w), "batched": lambda x, w: torch.einsum("bij,bkj->bik", x[None], w[None]),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([1], [1])), "inner": lambda x, w: torch.inner(x, w),
    "multi_dot": lambda x, w: torch.linalg.multi_dot([x, w.t(), x]), "chain_matmul": lambda x, w: torch.chain_matmul(x, w.t(), x),
    "attention": lambda x, w: torch.einsum("qk,kd->qd", torch.einsum("qd,kd->qk", x, w).softmax(-1), w),
    "matmul": lambda x, w: x @ w.t(), "linear": lambda x, w: F.linear(x, w), "bilinear": lambda x, w: F.bilinear(x, w, torch.ones(2, 4, 4)),
    "conv": lambda x, w: F.conv1d(x[None], w[:, :3, None]), "power": lambda x, w: torch.linalg.matrix_power(x.t() @ w, 3),
    # Autocast has kernels for these, to float32: what they are made of is not cast again.
    "norm": lambda x, w: torch.linalg.matrix_norm(x @ w.t()), "pinv": lambda x, w: torch.linalg.pinv(x + w), "cond": lambda x, w: torch.linalg.cond(x + w),
    "pinverse": lambda x, w: torch.pinverse(x + w) @ x, "rank": lambda x, w: torch.linalg.matrix_rank(x @ w.t()),
    "distances": lambda x, w: torch.cdist(x, w), "off": lambda x, w: without(x, w),
    "many distances": lambda x, w: torch.cdist(x.repeat(10, 1), w.repeat(10, 1)), "euclidean": lambda x, w: torch._euclidean_dist(x, w),
    "grid": lambda x, w: F.affine_grid(x[None, :2, :3], (1, 1, 2, 2), align_corners=False),  # one op to autograd
}


def without(x, w):
    with torch.autocast("cpu", enabled=False):
        y = torch.einsum("ij,kj->ik", x, w)
    return y, torch.einsum("ij,kj->ik", x, w)


def flat(y):
    return list(y) if isinstance(y, tuple) else [y]


def made(mode):
    g = torch.Generator().manual_seed(0)
    with torch.inference_mode(mode == "tensors"):
        return torch.randn(3, 4, generator=g).clone(), torch.randn(3, 4, generator=g).clone()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("mode", ["inference", "no_grad", "tensors"])
def test_casts(mode, inside, name):
    program = PROGRAMS[name]
    expects.compiled("library calls")

    def f(x, w):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside or torch.is_autocast_enabled("cpu")):
            return program(x, w)

    compiled = vitrify.compile(f)
    x, w = made(mode)
    results = []
    for g in (f, compiled, compiled):
        with torch.inference_mode(mode == "inference"), torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            results.append(flat(g(x, w)))
    for got in results[1:]:
        assert [t.dtype for t in got] == [t.dtype for t in results[0]]
        for a, b in zip(got, results[0]):
            torch.testing.assert_close(a, b, **bounds.AUTOCAST)


def test_composites_that_write_to_inference_tensors():  # eager counts writes that a composite makes: here it must not
    with torch.inference_mode():
        x, mean, var = torch.randn(2, 3, 4, 5), torch.zeros(3), torch.ones(3)
    compiled = vitrify.compile(lambda x, mean, var: F.instance_norm(x, mean, var, use_input_stats=True).sin())
    for _ in range(2):
        with torch.no_grad(), pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            compiled(x, mean, var)
    with torch.inference_mode():
        got, want = compiled(x, mean, var), F.instance_norm(x, torch.zeros(3), torch.ones(3), use_input_stats=True).sin()
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("layer", [lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), lambda: torch.nn.MultiheadAttention(8, 2, batch_first=True)])
def test_fast_paths(layer):  # opaque to autocast, and not what they are made of
    expects.eager("under autocast, which its kernel sees")
    torch.manual_seed(0)
    layer, x = layer().eval(), torch.randn(2, 3, 8)
    args = (x,) if isinstance(layer, torch.nn.TransformerEncoderLayer) else (x, x, x)

    def of(f):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            try:
                y = f(*args)
            except RuntimeError as e:
                return str(e)
        return y if isinstance(y, torch.Tensor) else y[0]

    want, got = of(layer), of(vitrify.compile(layer))
    assert type(want) is type(got)
    if isinstance(want, str):
        assert want == got
    else:
        torch.testing.assert_close(got, want)


OF_ANY_SIZE = {
    "by a vector": (lambda x, w: x @ w, (3, 4), (4,), torch.float32), "vector first": (lambda x, w: w @ x.mT, (3, 4), (4,), torch.float32),
    "by a matrix": (lambda x, w: x @ w, (3, 4), (4, 5), torch.float32), "batches": (lambda x, w: x @ w, (3, 4), (1, 4, 5), torch.float32),
    "distances": (lambda x, w: torch.cdist(x, w), (40, 3), (41, 3), torch.bfloat16), "quantile": (lambda x, w: torch.quantile(x.float(), 0.3, -1) + w, (5, 4), (), torch.float32),
    "quantiles": (lambda x, w: torch.nanquantile(x.float(), w.abs().clamp(max=1), -1), (5, 4), (2,), torch.float32),
}


@pytest.mark.parametrize("name", OF_ANY_SIZE)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_composites_of_any_size(dynamic, gradients, name):
    """What we take apart with symbols for sizes is cast before that, by autocast's own kernel."""
    program, rows, other, dtype = OF_ANY_SIZE[name]
    expects.compiled("library calls")
    compiled = vitrify.compile(program, dynamic=dynamic)
    w = torch.randn(other, dtype=dtype)
    for batch in (2, 3, 5, 6):
        x = torch.randn(batch, *rows, dtype=dtype)
        results = []
        for f in (program, compiled):
            a, b = x.clone().requires_grad_(gradients), w.clone().requires_grad_(gradients)
            with torch.autocast("cpu", torch.bfloat16):
                y = f(a, b)
            results.append([y, *(torch.autograd.grad(y.float().sin().sum(), (a, b)) if gradients else ())])
        for got, want in zip(*reversed(results)):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, **bounds.AUTOCAST)


@pytest.mark.parametrize("grad", [False, True])
def test_products_within_kernels(grad):
    """As eager rounds them, not only as near: in autocast's dtype."""
    torch.manual_seed(0)
    layer, x = torch.nn.Bilinear(6, 6, 3), torch.randn(4, 6)
    expects.compiled("library calls")

    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x, x.sin())

    with torch.set_grad_enabled(grad):
        assert torch.equal(vitrify.compile(f, fullgraph=True)(x), f(x))


@pytest.mark.parametrize("dims", [(0,), (0, 1), None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_what_is_joined_within_a_kernel(dtype, dims):
    """roll() joins two parts, and autocast to another half refuses that: such calls are eager's."""
    def f(x):
        return torch.roll(x, 1 if dims is None else (1,) * len(dims), dims)

    if dtype is torch.float16:
        expects.no_kernels("eager raises")
    x, said = torch.ones(3, 4).cumsum(1).to(dtype), []
    for g in (f, vitrify.compile(f)):
        try:
            with torch.autocast("cpu", torch.bfloat16):
                said.append(g(x).tolist())
        except RuntimeError as e:
            said.append(str(e))
    assert said[0] == said[1] and isinstance(said[0], str) == (dtype is torch.float16)
    assert vitrify.counters["eager_calls"] == (1 if dtype is torch.float16 else 0)
