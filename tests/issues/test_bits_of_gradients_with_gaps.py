"""A gradient that comes conjugated or negated, with gaps, where sizes change: what later levels read of it was turned twice (other numbers, silently)."""
import pytest
import torch
import vitrify
from torch.autograd import grad

D = torch.complex128
REAL = {
    "imag": lambda n: torch.randn(n, 3, dtype=D).conj().imag,
    "neg of rows": lambda n: torch._neg_view(torch.randn(n, 5)[:, :3]),
    "transposed": lambda n: torch.randn(3, n, dtype=D).t().conj().imag,
    "expanded": lambda n: torch._neg_view(torch.randn(3)).expand(n, 3),
    "expanded with gaps": lambda n: torch.randn(3, dtype=D).conj().imag.expand(n, 3),
    "zeros": lambda n: torch._efficientzerotensor((n, 3), dtype=torch.float64),
}
COMPLEX = {
    "gaps": lambda n: torch.randn(n, 3, 2, dtype=D)[..., 1].conj(),
    "rows": lambda n: torch.randn(n, 5, dtype=D)[:, :3].conj(),
    "dense": lambda n: torch.randn(n, 3, dtype=D).conj(),
    "transposed": lambda n: torch.randn(3, n, dtype=D).t().conj(),
    "expanded": lambda n: torch.randn(3, dtype=D).conj().expand(n, 3),
    "expanded with gaps": lambda n: torch.randn(3, 2, dtype=D)[:, 0].conj().expand(n, 3),
}
ATENS = pytest.mark.compiled("most of what complex programs do is ATen's")
CASES = [(torch.float64, k) for k in REAL] + [pytest.param(D, k, marks=ATENS) for k in COMPLEX]
PROGRAMS = {"product": lambda x, r: x * r, "sine": lambda x, r: (x * r).sin(), "matrix": lambda x, r: (x.t() @ x * r).sum(0) * x, "view": lambda x, r: (x * r).reshape(-1).view(x.shape)}


@pytest.fixture(autouse=True)
def doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def levels(call, r, x, t):
    first = grad(call(x, r), [x, r], t, create_graph=True)
    second = grad(sum(g.abs().square().sum() for g in first), [x, r], create_graph=True, allow_unused=True)
    third = grad(sum(g.abs().square().sum() for g in second if g is not None and g.grad_fn is not None), [x, r], allow_unused=True)
    return [*first, *second, *third]


@pytest.mark.parametrize("dynamic", [True, None, False])
@pytest.mark.parametrize("dtype, how", CASES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_three_levels(name, dtype, how, dynamic):
    torch.manual_seed(1)
    compiled, before = vitrify.compile(PROGRAMS[name], dynamic=dynamic), dict(vitrify.counters)
    r = torch.randn(3, dtype=dtype, requires_grad=True)
    for n in (2, 4, 3) if dynamic is not False else (2, 2):
        x, t = torch.randn(n, 3, dtype=dtype, requires_grad=True), (REAL if dtype is torch.float64 else COMPLEX)[how](n)
        for ours, eager in zip(levels(compiled, r, x, t), levels(PROGRAMS[name], r, x, t), strict=True):
            torch.testing.assert_close(ours, eager)
    assert vitrify.counters["eager_calls"] == before["eager_calls"]
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"] or dtype is D  # most of a complex program is ATen's


@pytest.mark.parametrize("dynamic", [True, None])
def test_one_that_comes_about_by_itself(dynamic):
    compiled, before = vitrify.compile(lambda x, r: x * r, dynamic=dynamic), vitrify.counters["kernels_launched"]
    r = torch.rand(4, requires_grad=True)
    for n in (2, 3):
        z, told = torch.randn(n, 4, 2, dtype=D, requires_grad=True), []
        for call in (lambda x, r: x * r, compiled):
            y = call(z[..., 1].conj(), r)
            g = grad((y * (1 + y.abs())).abs().square().sum(), [z, r], create_graph=True)
            h = grad(sum(a.abs().square().sum() for a in g), [z, r], create_graph=True)
            told.append(grad(sum(a.abs().sum() for a in h), r)[0])
        torch.testing.assert_close(told[1], told[0])
    assert vitrify.counters["kernels_launched"] > before


@ATENS
@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("name", PROGRAMS)
def test_batches(name, dynamic):
    compiled, before = vitrify.compile(PROGRAMS[name], dynamic=dynamic), vitrify.counters["eager_calls"]
    r = torch.rand(3, requires_grad=True)
    for n in (3, 2):
        x, t, told = torch.randn(n, 3, dtype=D, requires_grad=True), torch.randn(n, 3, 2, dtype=D).movedim(-1, 0).conj(), []
        for call in (PROGRAMS[name], compiled):
            g = grad(call(x, r), [x, r], t, is_grads_batched=True, create_graph=True)
            told.append(grad(sum(a.abs().square().sum() for a in g), r)[0])
        torch.testing.assert_close(told[1], told[0])
    assert vitrify.counters["eager_calls"] == before
