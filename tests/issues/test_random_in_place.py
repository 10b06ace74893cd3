"""Random ops in place, over tensors of every layout: the numbers, and the state in which they leave the generator, are eager's."""
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import compare  # noqa: E402
import expects  # noqa: E402

OPS = {
    "normal_": lambda t, g: t.normal_(generator=g), "normal_ shifted": lambda t, g: t.normal_(2.0, 3.0, generator=g), "uniform_": lambda t, g: t.uniform_(generator=g),
    "uniform_ of a range": lambda t, g: t.uniform_(-2, 3, generator=g), "bernoulli_": lambda t, g: t.bernoulli_(0.3, generator=g), "bernoulli_ sure": lambda t, g: t.bernoulli_(1.0, generator=g),
    "bernoulli_ of a tensor": lambda t, g: t.bernoulli_(torch.linspace(0, 1, t.numel()).reshape(t.shape), generator=g), "exponential_": lambda t, g: t.exponential_(2.0, generator=g),
    "geometric_": lambda t, g: t.geometric_(0.4, generator=g), "cauchy_": lambda t, g: t.cauchy_(generator=g), "log_normal_": lambda t, g: t.log_normal_(generator=g),
    "random_": lambda t, g: t.random_(generator=g), "random_ to": lambda t, g: t.random_(7, generator=g), "random_ from to": lambda t, g: t.random_(2, 9, generator=g),
    "dropout": lambda t, g: F.dropout(t, 0.4, inplace=True), "alpha_dropout": lambda t, g: F.alpha_dropout(t, 0.4, True, inplace=True), "feature_alpha_dropout": lambda t, g: F.feature_alpha_dropout(t, 0.4, True),
    "dropout out of place": lambda t, g: F.dropout(t, 0.4), "rrelu": lambda t, g: F.rrelu(t, training=True, inplace=True), "wrong": lambda t, g: t.normal_(0, -1.0, generator=g),
    "wrong range": lambda t, g: t.uniform_(3, 2, generator=g),
}
LIKE = {
    "rand_like": lambda t, g: torch.rand_like(t), "randn_like": lambda t, g: torch.randn_like(t), "randint_like": lambda t, g: torch.randint_like(t, 9), "bernoulli": lambda t, g: torch.bernoulli(t.sigmoid(), generator=g),
    "normal of a mean": lambda t, g: torch.normal(t, 1.0, generator=g), "normal of a deviation": lambda t, g: torch.normal(0.0, t.abs(), generator=g), "poisson": lambda t, g: torch.poisson(t.abs(), generator=g),
}
LAYOUTS = {
    "contiguous": lambda n: (torch.zeros(n, 4), lambda t: t), "transposed": lambda n: (torch.zeros(4, n), lambda t: t.t()), "columns": lambda n: (torch.zeros(n, 8), lambda t: t[:, ::2]),
    "rows": lambda n: (torch.zeros(2 * n, 4), lambda t: t[::2]), "a part": lambda n: (torch.zeros(n + 2, 6), lambda t: t[1:-1, 1:-1]), "a row": lambda n: (torch.zeros(3, n), lambda t: t[1]),
    "a column": lambda n: (torch.zeros(n, 3), lambda t: t[:, 1]), "transposed part": lambda n: (torch.zeros(6, n + 1), lambda t: t[1:5, 1:].t()), "diagonal": lambda n: (torch.zeros(n, n), lambda t: t.diagonal()),
    "channels last": lambda n: (torch.zeros(1, 3, 2, n).contiguous(memory_format=torch.channels_last), lambda t: t), "permuted": lambda n: (torch.zeros(2, 3, n), lambda t: t.permute(1, 2, 0)),
    "expanded": lambda n: (torch.zeros(n, 1), lambda t: t.expand(n, 3)), "strided input": lambda n: (torch.zeros(4, n).t(), lambda t: t), "gaps input": lambda n: (torch.zeros(n, 8)[:, ::2], lambda t: t),
    "empty": lambda n: (torch.zeros(0, 4).t(), lambda t: t), "0-d": lambda n: (torch.zeros(()), lambda t: t),
}
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def run(f, base, g):
    torch.manual_seed(5)
    g.manual_seed(9)
    x, error, out = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype).copy_(base), None, None
    before = x._version
    try:
        out = f(x)
    except Exception as e:
        error = type(e), str(e).partition("\n")[0]
    return out, error, x, x._version - before, torch.get_rng_state(), g.get_state()


def check(f, base, g, native, name=None):
    compiled, before = vitrify.compile(f), dict(vitrify.counters)
    for _ in range(2):
        a, b = run(compiled, base, g), run(f, base, g)
        assert a[1] == b[1]
        assert (a[0] is None) == (b[0] is None)
        for (where, p), (_, q) in zip(compare.flat((a[0], a[2])), compare.flat((b[0], b[2]))):
            if isinstance(q, torch.Tensor):
                compare.check_meta(where, p, q)
                if name is not None and "alpha" in name and q.dtype in (torch.float16, torch.bfloat16):  # eager rounds in between
                    torch.testing.assert_close(p, q)
                else:
                    assert compare.bits_equal(p, q), where
        assert a[3] == b[3] and torch.equal(a[4], b[4]) and torch.equal(a[5], b[5])
    if b[1] is not None:
        expects.no_kernels("the program raises")
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    if native and b[1] is None:
        assert did["compiled_calls"] == 2 and did["eager_calls"] == 0, did
    vitrify.reset()


@pytest.mark.sweep(4)
@pytest.mark.compiled("ATen draws the numbers")
@pytest.mark.eager("recorded ", "geometric not implemented", some=True)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPS | LIKE)
def test_in_place(name, layout):
    op, g = (OPS | LIKE)[name], torch.Generator()
    for dtype in TYPES + [torch.int64, torch.int8, torch.bool] * (name.startswith(("random_", "bernoulli_", "geometric"))):
        for n in (2, 3, 7, 40):
            base, view = LAYOUTS[layout](n)
            base = torch.empty_strided(base.shape, base.stride(), dtype=dtype).zero_()
            with torch.no_grad():
                for explicit in (None, g) if n == 7 else (None,):
                    check(lambda x: op(view(x), explicit), base, g, native=name not in LIKE and layout not in ("expanded", "empty"), name=name)  # noqa: B023


@pytest.mark.parametrize("layout", [pytest.param(n, marks=pytest.mark.compiled("nothing has elements but what ATen draws")) if n == "empty" else n for n in LAYOUTS])
def test_inside_a_program(layout):
    """Of memory the program makes, between other draws; twice, so that what a draw leaves in the generator is seen by the next."""
    base, view = LAYOUTS[layout](7)

    def f(x):
        y = x * 2
        v = view(y)
        v = v if v.numel() <= y.numel() else y
        a = torch.rand(3)
        v.normal_()
        b = torch.randn(5)
        v.mul_(torch.rand_like(v))
        return y + 1, a, b, v.clone(), torch.randn(20)
    check(f, base, torch.Generator(), native=True)


@pytest.mark.compiled("ATen draws complex numbers alone")
@pytest.mark.parametrize("shape", [(3, 5), (4, 16)])
def test_complex(shape):
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[:, ::2]):
        check(lambda x: view(x).normal_(), torch.zeros(shape, dtype=torch.complex64), torch.Generator(), native=True)  # noqa: B023


def test_sizes_that_change():
    f = vitrify.compile(lambda x: (x.t().normal_(), x + 1), dynamic=True)
    for n in (3, 5, 8, 20):
        torch.manual_seed(3)
        a = torch.zeros(4, n)
        ours = f(a), torch.get_rng_state()
        torch.manual_seed(3)
        b = torch.zeros(4, n)
        b.t().normal_()
        assert torch.equal(a, b) and torch.equal(ours[0][1], b + 1) and torch.equal(ours[1], torch.get_rng_state())
