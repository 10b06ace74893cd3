"""The derivative of a product with several zeros is zero, but not the derivative of that: it was. ATen takes a determinant's by singular values only where
it is zero: derivatives of those need distinct ones, and at the identity they were NaN. What is not chosen gives zeros, also where infinities are behind it."""
import itertools
import math

import bounds
import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch.utils.checkpoint import checkpoint

PRODUCTS = {"whole": lambda x: x.prod(), "of rows": lambda x: x.view(2, 2).prod(1), "whole of a matrix": lambda x: x.view(2, 2).t().prod()}


def hessian(f, x):
    x = x.clone().requires_grad_()
    out = f(x)
    grad, = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    return grad, torch.stack([torch.autograd.grad(g, x, retain_graph=True)[0] for g in grad.reshape(-1)])


@pytest.mark.parametrize("values", [[2, 3, 0, 0], [0, 3, 0, 5], [2, 0, 0, 0], [2, 0, 4, 5], [2, 3, 4, 5]])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_zeros(name, values):
    x = torch.tensor(values, dtype=torch.float64)
    compiled = vitrify.compile(PRODUCTS[name])
    for ours, eager in zip(hessian(compiled, x), hessian(PRODUCTS[name], x)):
        torch.testing.assert_close(ours, eager, rtol=1e-12, atol=1e-12)
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["fallbacks"] == 0


@pytest.mark.parametrize("zeros", [[], [3], [0, 3], [6]])
def test_cumulative_products(zeros):
    """ATen's formula takes a step an element, here and where a mode is on."""
    x = torch.linspace(0.5, 1.5, 7, dtype=torch.float64)
    x[zeros] = 0
    f = lambda x: (x * 2).cumprod(0)  # noqa: E731
    for ours, eager in zip(hessian(vitrify.compile(f), x), hessian(f, x)):
        torch.testing.assert_close(ours, eager, rtol=1e-12, atol=1e-12)
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["fallbacks"] == 0


def test_long_cumulative_products():
    nodes = {}
    for n in (32, 512):
        before = vitrify.counters["values_compiled"]
        x = torch.ones(2, n, requires_grad=True)
        grad, = torch.autograd.grad(vitrify.compile(lambda x: (x * 2).cumprod(1), dynamic=False)(x)[:, 3].sum(), x, create_graph=True)
        grad.square().sum().backward()
        nodes[n] = vitrify.counters["values_compiled"] - before
    assert nodes[512] < 2 * nodes[32], nodes


def test_sizes_that_each_need_a_derivative():
    """Beyond what is kept, each call compiled it again, for ever, and nothing was let go of."""
    f = lambda x, w: F.batch_norm(x @ w, None, None, training=True).sin()
    compiled, w = vitrify.compile(f, dynamic=True), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def step(f, n):
        x = torch.linspace(-1, 2, 3 * n, dtype=torch.float64).view(n, 3).square().requires_grad_()
        grad, = torch.autograd.grad(f(x, w).exp().sum(), x, create_graph=True)
        return grad.detach(), *torch.autograd.grad(grad.square().sum(), (x, w))
    expects.eager("too many come in turn")
    for turn in range(4):
        before = vitrify.counters["values_compiled"]
        for n in range(4, 16):
            for ours, eager in zip(step(compiled, n), step(f, n)):
                torch.testing.assert_close(ours, eager, rtol=1e-9, atol=1e-9)
    assert vitrify.counters["values_compiled"] == before


INF, NAN = float("inf"), float("nan")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("values", itertools.combinations_with_replacement([INF, -INF, NAN, 0.0, 2.0], 2), ids=str)
@pytest.mark.parametrize("place", [(1, 2), (0, 3)], ids=str)
@pytest.mark.parametrize("fn", [lambda x: x.cumprod(1), lambda x: x.prod(1), lambda x: x.prod(), lambda x: x.cumprod(0)], ids=["cumprod", "prod", "prod of all", "cumprod of columns"])
def test_products_at_infinity(fn, place, values):
    """A gradient of zero came back through the branch that was not chosen, and met the infinities behind it."""
    results = []
    for f in (vitrify.compile(fn), fn):
        x = torch.arange(1.0, 9.0).view(2, 4).clone()
        x[0, place[0]], x[0, place[1]] = values
        x.requires_grad_()
        g, = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        results.append([g.detach(), torch.autograd.grad(g.sum(), x)[0]])
    torch.testing.assert_close(*results, equal_nan=True)


MATRICES = {
    "identity": torch.eye(3), "singular": torch.diag(torch.tensor([1.0, 2, 0])), "both": torch.stack([torch.eye(2), torch.ones(2, 2)]),
    "invertible": torch.tensor([[2.0, 1], [0, 3]]), "batch": torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)), "of one": torch.ones(1, 1) * 3,
}


@pytest.mark.parametrize("matrix", MATRICES)
def test_determinants(matrix, recwarn):
    def fn(x):
        return torch.linalg.det(x) * 2
    x = MATRICES[matrix].double()
    try:
        theirs = hessian(fn, x)
    except RuntimeError as e:  # from 2.15 on that of one element is a number
        assert matrix == "of one" and "does not require grad" in str(e)
        with pytest.raises(RuntimeError, match="does not require grad"):
            hessian(vitrify.compile(fn), x)
        theirs = []
    for o, eager in zip(hessian(vitrify.compile(fn), x) if theirs else [], theirs):
        torch.testing.assert_close(o, eager, rtol=1e-12, atol=1e-12)
        assert matrix in ("singular", "both") or o.stride() == eager.stride()  # eager's follow from the values
    assert not [w for w in recwarn if issubclass(w.category, vitrify.VitrifyWarning)]


@pytest.mark.parametrize("fn", [torch.logdet, lambda x: torch.linalg.slogdet(x)[1]], ids=["logdet", "slogdet"])
def test_logarithms_of_determinants(fn, recwarn):
    a = torch.randn(2, 4, 4, dtype=torch.float64)
    x = a @ a.mT + torch.eye(4)
    for o, eager in zip(hessian(vitrify.compile(lambda x: fn(x) * 2), x), hessian(lambda x: fn(x) * 2, x)):
        torch.testing.assert_close(o, eager, rtol=1e-12, atol=1e-12)
    assert not [w for w in recwarn if issubclass(w.category, vitrify.VitrifyWarning)]


SIGNS = {
    "norm": lambda x: x.norm(dim=1),
    "norm of everything": lambda x: x.norm(1),
    "normalize": lambda x: torch.nn.functional.normalize(x, dim=1),
    "softsign": torch.nn.functional.softsign,
    "of what overflows": lambda x: (x * torch.inf).abs(),
    "abs over a sum": lambda x: x.abs() / (1 + x.abs().sum(1, keepdim=True)),
}


@pytest.mark.parametrize("values", ["usual", "infinite"])
@pytest.mark.parametrize("name", SIGNS)
def test_zeros_without_memory(name, values, recwarn):
    torch.manual_seed(0)
    x = torch.randn(3, 4, dtype=torch.float64)
    if values == "infinite":
        x[0, 1], x[2, 3] = torch.inf, -torch.inf
    compiled = vitrify.compile(SIGNS[name])
    for ours, eager in zip(hessian(compiled, x), hessian(SIGNS[name], x)):
        torch.testing.assert_close(ours, eager, rtol=1e-12, atol=1e-12, equal_nan=True)
        assert ours.stride() == eager.stride()
    assert not [w for w in recwarn if issubclass(w.category, vitrify.VitrifyWarning)]
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["fallbacks"] == vitrify.counters["eager_calls"] == 0


def test_gradient_penalty(recwarn):
    torch.manual_seed(0)
    critic = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Softsign(), torch.nn.Linear(16, 1))

    def loss(x):
        x = x.detach().requires_grad_()
        grad, = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return ((grad.norm(2, dim=1) - 1) ** 2).mean()

    compiled = vitrify.compile(loss, dynamic=True)
    for rows in (5, 8, 9):
        x = torch.randn(rows, 6)
        parameters = list(critic.parameters())
        eager, ours = (torch.autograd.grad(f(x), parameters, allow_unused=True) for f in (loss, compiled))
        for e, o in zip(eager, ours):
            torch.testing.assert_close(o, e, **bounds.SECOND_ORDER)
    assert not [w for w in recwarn if issubclass(w.category, vitrify.VitrifyWarning)]
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["fallbacks"] == vitrify.counters["eager_calls"] == 0


CONJUGATES = {
    "polar": lambda x: torch.view_as_real(torch.polar(x, x.sin())),
    "a conjugate": lambda x: torch.view_as_real(torch.complex(x, x * 2).conj() * (1 + 2j)),
    "an imaginary part": lambda x: (torch.complex(x, x.sin()).conj().imag * x),
}


@pytest.mark.parametrize("name", CONJUGATES)
def test_gradients_that_are_conjugate_views(name):
    results = []
    for f in (vitrify.compile(CONJUGATES[name], fullgraph=True), CONJUGATES[name]):
        x = torch.linspace(0.5, 2, 6).view(2, 3).requires_grad_()
        grads = [f(x)]
        for _ in range(3):
            grads.append(torch.autograd.grad(grads[-1].sin().sum(), x, create_graph=True)[0])
        results.append([g.detach() for g in grads])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("fn", [lambda z: z.conj(), lambda z: z.conj() * 2, lambda z: (z * z).conj(), lambda z: z.imag, lambda z: z.conj().imag * 3], ids=["conj", "times", "square", "imag", "of conj"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_complex_arguments(fn, create_graph):
    """As eager gives them: a conjugate view where eager's is."""
    def program(z, x):
        return fn(z), x.sin().exp()  # kernels of ours have no complex numbers

    results = []
    for f in (vitrify.compile(program, fullgraph=True), program):
        z = torch.complex(torch.arange(4.), torch.ones(4)).requires_grad_()
        g, = torch.autograd.grad(f(z, torch.ones(3))[0].abs().sum(), z, create_graph=create_graph)
        results.append((g.detach().resolve_conj().resolve_neg(), g.is_conj(), g.is_neg(), g.stride()))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


@pytest.mark.parametrize("write", ["result", "data of the result", "argument", "data of the argument"])
@pytest.mark.parametrize("fn", [lambda x: (x * x).cumprod(1), lambda x: (x * x).prod(1), lambda x: x.prod(), lambda x: (x * x).cumprod(0), lambda x: x.prod(0, keepdim=True),
                                lambda x: x.view(-1).prod(0)],
                         ids=["cumprod", "prod", "prod of all", "cumprod of columns", "kept", "of a vector"])
def test_products_written_since(fn, write):
    """What eager's derivative of a product has saved is the result itself: it sees what is written to that before the next derivative, or raises."""
    def run(f):
        x = torch.tensor([[1.0, 2.0], [4.0, 3.0]], dtype=torch.float64, requires_grad=True)
        y = f(x)
        g, = torch.autograd.grad(y.sum(), x, create_graph=True)
        t = y if "result" in write else x
        with torch.no_grad():
            (t.data if "data" in write else t).mul_(2)
        try:
            h, = torch.autograd.grad(g.square().sum(), x, create_graph=True)
            return h.detach(), torch.autograd.grad(h.sin().sum(), x)[0]
        except RuntimeError as e:
            return str(e).partition(": [")[0]
    eager, ours = run(fn), run(vitrify.compile(fn, fullgraph=True))
    if isinstance(eager, str):
        assert ours == eager
    else:
        torch.testing.assert_close(ours, eager)


OF_RESULTS = {
    "prod": lambda x: x.prod(1), "prod kept": lambda x: x.prod(0, keepdim=True), "prod of all": lambda x: x.prod(), "cumprod": lambda x: x.cumprod(1), "cumprod of columns": lambda x: x.cumprod(0),
    "exp": torch.exp, "det": torch.linalg.det,
}


@pytest.mark.parametrize("values", [[[1.0, 2.0], [4.0, 3.0]], [[0.0, 2.0], [4.0, 3.0]], [[0.0, 0.0], [4.0, 3.0]]], ids=["no zero", "a zero", "zeros"])
@pytest.mark.parametrize("inside", [False, True], ids=["of an argument", "of what is made inside"])
@pytest.mark.parametrize("name", OF_RESULTS)
def test_gradients_through_the_result(name, inside, values):
    """Eager's derivative of a product reads the result where no factor is zero: the next gradient goes to that, to its hooks and its .grad."""
    expects.compiled("ATen computes all of it") if name == "det" else None
    fn = OF_RESULTS[name]

    def program(x):
        h = x * 1.5 if inside else x
        return fn(h), h

    def run(f):
        made = []
        for again in (False, True):  # with what it has learned
            x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
            y, h = f(x)
            y.retain_grad()
            y.register_hook(lambda g: made.append(g.detach().clone()))
            for tangent in (torch.ones_like(y), y * 2):
                g, = torch.autograd.grad(y, x, tangent, create_graph=True)
                made += torch.autograd.grad(g.square().sum(), (y, h, x), retain_graph=True, allow_unused=True)
                second, = torch.autograd.grad(g.square().sum(), x, create_graph=True)
                made += torch.autograd.grad(second.square().sum(), (y, x), retain_graph=True, allow_unused=True)
            g.square().sum().backward()
            made += [y.grad, x.grad]
        return [None if t is None else t.detach() for t in made]

    for ours, eager in zip(run(vitrify.compile(program, fullgraph=True)), run(program), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", [n for n in OF_RESULTS if n != "det"])
@pytest.mark.eager("op by op: what they read is changed", some=True)
def test_products_whose_factors_are_assigned(name, when):
    """Its .data is read where eager reads it, and what came of it before where eager reads that."""
    def program(x):
        h = x * 1
        return h, OF_RESULTS[name](h)

    def run(f):
        x = torch.tensor([[1.0, 2.0], [4.0, 3.0]], dtype=torch.float64, requires_grad=True)
        h, y = f(x)
        if when == "before":
            h.data = h.data * 1.5 + 0.1
        g, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        if when == "after":
            h.data = h.data * 1.5 + 0.1
        return g.detach(), torch.autograd.grad(g.square().sum(), x)[0]

    torch.testing.assert_close(run(vitrify.compile(program, fullgraph=True)), run(program))


@pytest.mark.parametrize("values", [[[1.0, 2.0], [4.0, 3.0]], [[0.0, 2.0], [4.0, 3.0]]], ids=["no zero", "a zero"])
@pytest.mark.parametrize("outer", [0, 1], ids=["the result", "inside"])
@pytest.mark.parametrize("name", ["prod", "prod kept", "prod of all", "cumprod", "cumprod of columns", "exp"])
def test_gradients_through_the_result_of_a_checkpoint(name, outer, values):
    """Its hooks give what was saved once."""
    def program(x):
        y = checkpoint(lambda x: OF_RESULTS[name](x * 1.1), x, use_reentrant=False)
        return y * 1.2 if outer else y

    def run(f):
        x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        y = f(x)
        g, = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return [g.detach(), *torch.autograd.grad(g.square().sum(), (y, x))]
    torch.testing.assert_close(run(vitrify.compile(program, fullgraph=True)), run(program))


@pytest.mark.parametrize("write", ["factors", "tangent", None])
@pytest.mark.parametrize("n", [6, 12])
def test_cumulative_products_with_zeros_written_unseen(n, write):
    """Eager's derivative, whose nodes grow with the square of the length, reads the factors again. Of long ones ours is another formula, which reads a copy:
    it says so where that would be another result."""
    def run(f):
        x = torch.linspace(0.5, 1.5, n, dtype=torch.float64)
        x[2] = 0
        x.requires_grad_()
        y = f(x)
        tangent = torch.linspace(-1.0, 1.0, n, dtype=torch.float64)
        g, = torch.autograd.grad(y, x, tangent, create_graph=True)
        if write:
            (x if write == "factors" else tangent).data.add_(1.0)
        return g.detach(), *torch.autograd.grad(g.square().sum(), x)

    f = vitrify.compile(lambda x: x.cumprod(0), fullgraph=True)
    if write and n > 8:
        with pytest.raises(RuntimeError, match="a cumulative product with a zero reads what was written to unseen"):
            run(f)
    else:
        torch.testing.assert_close(run(f), run(lambda x: x.cumprod(0)))


@pytest.mark.parametrize("shape", [(4,), (4, 5)], ids=str)
def test_what_a_checkpoint_of_any_size_has_dropped(shape):
    """The second derivative had fixed the sizes, and took the mask for another one."""
    def f(x):
        y = checkpoint(lambda t: F.dropout(t, 0.3) * 2, x, use_reentrant=False)
        return torch.reciprocal(y.abs() + 1)
    told = []
    for g in (vitrify.compile(f, dynamic=True), f):
        x = torch.linspace(0.5, 2, math.prod(shape)).view(shape).requires_grad_()
        torch.manual_seed(3)
        loss = g(x).square().sum()
        gradient, = torch.autograd.grad(loss, x, create_graph=True)
        told.append(torch.autograd.grad(gradient.square().sum(), x)[0])
    torch.testing.assert_close(*told)


def test_indices_that_only_zeros_are_added_by():
    """Nothing reads what an op that checks its indices gives: they were not kept for it, and the derivative raised."""
    def f(x, index):
        return torch.poisson(x.abs()).index_select(0, index).geometric_(0.4)

    x, index = torch.randn(3, 8, dtype=torch.float64, requires_grad=True), torch.tensor([2])
    (g,) = torch.autograd.grad(vitrify.compile(f)(x, index).sum(), x, create_graph=True)
    assert g.requires_grad and torch.equal(g, torch.zeros_like(g))
    (q,) = torch.autograd.grad(g.sum(), x)
    assert torch.equal(q, torch.zeros_like(q))
