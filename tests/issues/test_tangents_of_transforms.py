"""Tangents that are no plain memory: of vmap, sparse. ATen's ops take them, as eager's formulas do."""
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch.autograd.functional import hessian, hvp, jacobian
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from gradients import leaf  # noqa: E402

PROGRAMS = {
    "product": lambda x, y: x * y, "sine": lambda x, y: (x * y).sin(), "matrix": lambda x, y: (x @ y.t()).tanh(), "softmax": lambda x, y: (x * y).softmax(-1), "norm": lambda x, y: F.layer_norm(x * y, (3,)),
    "cat": lambda x, y: torch.cat([x, y]).exp(), "index": lambda x, y: x[[0, 0, 1]] * y[0], "max": lambda x, y: x.max(0)[0] * y[0], "cumsum": lambda x, y: x.cumsum(0) * y, "sum": lambda x, y: (x * y).sum(0), "relu": lambda x, y: (x - y).relu() * y,
    "linear with a bias": lambda x, y: F.linear(x, y, y.sum(1)) + x.sum(), "sum of both": lambda x, y: x + y, "scaled": lambda x, y: (x * 2).t() - y.sum(),
    "linear": lambda x, y: F.gelu(F.linear(x, y)), "written": lambda x, y: x.clone().mul_(y).add_(1), "view": lambda x, y: (x * y).view(-1)[1:], "where": lambda x, y: torch.where(x > y, x, y * 2),
}


def beside(fn, run):
    results = []
    for f in (fn, vitrify.compile(fn)):
        results.append(run(f))
    torch.testing.assert_close(*results)
    assert vitrify.counters["compiled_calls"] > 0 and vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_batched(name, create_graph):
    def run(f):
        x, y = leaf(2, 3, dtype=torch.float64), leaf(2, 3, seed=2, dtype=torch.float64)
        out = f(x, y)
        tangents = torch.eye(out.numel(), dtype=out.dtype).view(out.numel(), *out.shape)
        grads = torch.autograd.grad(out, (x, y), tangents, is_grads_batched=True, create_graph=create_graph, retain_graph=True)
        told = [g.detach() for g in grads] + list(torch.autograd.grad(out.sum(), (x, y), retain_graph=True))
        if create_graph and any(g.requires_grad for g in grads):
            told += [g for g in torch.autograd.grad(sum(g.square().sum() for g in grads), (x, y), allow_unused=True) if g is not None]
        return told
    beside(PROGRAMS[name], run)


PLACES = {
    "read": lambda x, i: x[i] * 2, "a mask": lambda x, i: x[x > 0], "columns": lambda x, i: x.view(2, 2)[:, i[:2] % 2], "as_strided": lambda x, i: (x * 2).as_strided((2, 2), (2, 1)).sin(),
    "a part": lambda x, i: (lambda h: (h[1:].mul_(3), h)[1])(x * 2), "filled": lambda x, i: (lambda h: (h[::2].fill_(1), h.sin())[1])(x * 2), "diagonal": lambda x, i: (lambda h: (h.diagonal().mul_(3), h)[1])(x.view(2, 2) * 2),
    "copied": lambda x, i: (lambda h: (h[1].copy_(x[:2]), h)[1])(x.view(2, 2) * 2), "masked": lambda x, i: (lambda h: (h[1:].masked_fill_(x[1:] > 0, 2), h)[1])(x * 2),
}


MEMORY = {
    "trace": lambda x, i: x.view(2, 2).trace(), "group norm": lambda x, i: F.group_norm(x.view(1, 4, 1) * x.view(1, 1, 4), 2), "transposed": lambda x, i: x.view(2, 2).t().exp(), "rot90": lambda x, i: x.view(2, 2).rot90() * 2,
    "embedding": lambda x, i: F.embedding(i % 2, x.view(2, 2)), "batch norm": lambda x, i: F.batch_norm(x.view(2, 2) * x.view(2, 2), None, None, training=True), "single": lambda x, i: x.float() * 2, "diagflat": lambda x, i: x.diagflat().exp(), "cat": lambda x, i: torch.cat([x, x.flip(0)]).cumsum(0),
    "diagonal written": lambda x, i: (lambda h: (h.diagonal().mul_(3), h)[1])((x[:, None] * x[None])), "row written": lambda x, i: (lambda h: (h[0].mul_(2), h)[1])(x.view(2, 2) * 1), "column copied": lambda x, i: (lambda h: (h[:, 0].copy_(x[2:]), h)[1])(x.view(2, 2) * 1),
}
ROWS = {
    "first": (lambda t: t, 0), "last": (lambda t: t.movedim(0, -1).contiguous(), -1), "last, as it lies": (lambda t: t.movedim(0, -1), -1), "gaps": (lambda t: t.repeat_interleave(2, 0)[::2], 0), "expanded": (lambda t: t[:1].expand(t.shape), 0),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", PLACES | MEMORY)
def test_gradients_under_vmap(name, rows):
    """torch's rules for batches count in the memory of the batch, or there is none: gradients were wrong where the batch was not the outermost dim, and some raised."""
    fn, i = (PLACES | MEMORY)[name], torch.tensor([0, 2, 2])
    x = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    out, theirs = vitrify.compile(fn)(x, i), fn(x, i)
    lay, dim = ROWS[rows]
    tangents = torch.linspace(-1, 2, 3 * out.numel(), dtype=out.dtype).view(3, *out.shape)
    gradient = lambda of: lambda t: torch.autograd.grad(of, x, t, retain_graph=True)[0]  # noqa: E731
    ours = torch.func.vmap(gradient(out), in_dims=dim)(lay(tangents))
    torch.testing.assert_close(ours, torch.stack([gradient(theirs)(t) for t in lay(tangents).movedim(dim, 0)]))
    torch.testing.assert_close(gradient(out)(torch.ones_like(out)), gradient(theirs)(torch.ones_like(out)))


@pytest.mark.eager("op by op: what they read is changed", some=True)
@pytest.mark.parametrize("name", ["trace", "row written", "transposed"])
def test_vmap_after_a_weight_was_assigned(name):
    x, i = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_(), torch.tensor([0, 2, 2])
    w = torch.ones(4, dtype=torch.float64)
    fn = lambda x, i: MEMORY[name](x * w.exp(), i)  # noqa: E731
    out, theirs = vitrify.compile(fn)(x, i), fn(x, i)
    x.data = x.data.clone()
    gradient = lambda of: torch.func.vmap(lambda t: torch.autograd.grad(of, x, t, retain_graph=True)[0], in_dims=-1)  # noqa: E731
    tangents = torch.linspace(-1, 2, 3 * out.numel(), dtype=out.dtype).view(*out.shape, 3)
    torch.testing.assert_close(gradient(out)(tangents), gradient(theirs)(tangents))


def test_vmap_in_vmap():
    fn = lambda x: (x.view(2, 2) @ x.view(2, 2).t()).sin()  # noqa: E731
    x = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    out, theirs = vitrify.compile(fn)(x), fn(x)
    tangents = torch.linspace(-1, 2, 24, dtype=torch.float64).view(2, 3, 2, 2)
    for inner, outer in ((0, 0), (1, 0), (0, 1), (-1, 0)):
        twice = lambda of: torch.func.vmap(torch.func.vmap(lambda t: torch.autograd.grad(of, x, t.reshape(2, 2), retain_graph=True)[0], in_dims=inner), in_dims=outer)  # noqa: B023, E731
        given = tangents if inner != -1 else tangents.movedim(1, -1)
        if (inner, outer) == (1, 0):
            given = tangents.movedim(1, 2)
        torch.testing.assert_close(twice(out)(given if outer == 0 else given.movedim(0, 1)), twice(theirs)(given if outer == 0 else given.movedim(0, 1)))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_batched_backward_has_a_plan(name):
    """It ran op by op: no kernels, and numbers of a derivative took part in the choice of dtypes where they do not in eager. The layout is eager's."""
    def run(f):
        x, y = leaf(2, 3), leaf(2, 3, seed=2)
        out = f(x, y)
        rows = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(1))
        for tangents in (rows, rows[:1].expand(3, *out.shape), rows.flip(0), rows.transpose(0, -1).contiguous().transpose(0, -1)):
            told = torch.autograd.grad(out, (x, y), tangents, is_grads_batched=True, retain_graph=True, allow_unused=True)
            yield [(g, g.stride()) for g in told if g is not None]
    beside(PROGRAMS[name], lambda f: list(run(f)))
    if name != "max":  # the formula looks at values
        assert vitrify.counters["fallbacks"] == 0


def test_a_batched_backward_does_not_draw():
    """Eager refuses it, whatever the program was compiled with."""
    def f(x):
        return checkpoint(lambda t: F.dropout(t, 0.3) * 2, x * x, use_reentrant=False)
    for run in (f, vitrify.compile(f)):
        x = leaf(4, 3)
        out = run(x)
        with pytest.raises(RuntimeError, match="do not yet support calling random operations inside of vmap"):
            torch.autograd.grad(out, x, torch.ones(2, 4, 3), is_grads_batched=True)
        run(x).sum().backward()
    assert vitrify.counters["compiled_calls"] > 0 and vitrify.counters["eager_calls"] == 0


@pytest.mark.parametrize("more", [{}, {"vectorize": True}, {"create_graph": True}, {"vectorize": True, "create_graph": True}], ids=str)
def test_jacobians(more):
    x = torch.linspace(0.1, 1, 3, dtype=torch.float64)
    for f in (lambda x: (x * 2).sin(), lambda x: x.softmax(-1) * x, lambda x: x.unsqueeze(-1) * x.exp()):
        beside(f, lambda g: jacobian(g, x, **more).detach())
        beside(lambda x, f=f: f(x).square().sum(), lambda g: hessian(g, x, **more).detach())
        beside(lambda x, f=f: f(x).square().sum(), lambda g: hvp(g, x, torch.ones_like(x)))


@pytest.mark.eager("they come by tangents that are no plain tensors")
def test_sparse_and_differentiable():
    """No plan takes them, and no other program may stand for the derivative: that is said, and the next call is eager's."""
    def run(f):
        x, y = leaf(4, 3), leaf(4, 3, seed=2)
        return [g.to_dense() for g in torch.autograd.grad(f(x, y), (x, y), torch.eye(4, 3).to_sparse(), create_graph=True)]
    compiled = vitrify.compile(torch.add)
    with pytest.raises(RuntimeError, match="cannot be compiled: they come by tangents that are no plain tensors; calls from now on run eagerly"):
        run(compiled)
    torch.testing.assert_close(run(compiled), run(torch.add))


@pytest.mark.parametrize("through", ["backward", "an embedding"])
@pytest.mark.parametrize("name", ["product", "sine", "matrix", "sum of both", "scaled", "view"])
@pytest.mark.eager("op by op: they come by tangents", "op by op: what they read is changed", some=True)
def test_sparse(name, through):
    program = {**PROGRAMS, "sum of both": lambda x, y: x + y, "scaled": lambda x, y: x * 2}[name]

    def run(f):
        x, y = leaf(4, 3), leaf(4, 3, seed=2)
        out = f(x, y)
        try:
            if through == "backward":
                out.backward(torch.ones_like(out).detach().to_sparse())
            else:
                F.embedding(torch.tensor([1, 1, 2]), out.view(4, -1) if out.dim() == 2 else out.view(-1, 1), sparse=True).sum().backward()
        except (RuntimeError, NotImplementedError) as e:  # eager's ops refuse some
            return type(e).__name__, str(e).partition("\n")[0]
        return [(g.layout, g.to_dense()) if g is not None else None for g in (x.grad, y.grad)]
    results = [run(f) for f in (program, vitrify.compile(program))]
    assert vitrify.counters["compiled_calls"] > 0 and vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0
    if isinstance(results[0], tuple):
        assert results[0] == results[1]
        return
    for a, b in zip(*results):
        assert (a is None) == (b is None)
        if a is not None:
            assert a[0] == b[0]
            torch.testing.assert_close(a[1], b[1])
