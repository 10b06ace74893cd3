"""A call may be given what the program also reaches by itself: a tied weight, a buffer. The plan of that call serves others, which are given something else."""
import bounds
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch import nn


def leaf(seed, needs_grad=True):
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_(needs_grad)


W, B = leaf(0), leaf(1, False)
FNS = {
    "mul": lambda x, w: x * w.sin(), "linear": lambda x, w: F.linear(x, w), "reversed": lambda x, w: F.linear(w, x), "returned": lambda x, w: (w, x + 1, x, w.sum()),
    "view": lambda x, w: w[1:] * x[1:], "twice": lambda x, w: (x @ w) @ (w @ x),
}


def same(a, b):
    for t, u in zip(a if isinstance(a, tuple) else (a,), b if isinstance(b, tuple) else (b,), strict=True):
        torch.testing.assert_close(t, u)


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
@pytest.mark.parametrize("fn", FNS)
def test_values_of_others(fn):
    """The argument was taken for both: the next call was computed without what the program reaches."""
    compiled = vitrify.compile(lambda x: FNS[fn](x, B), fullgraph=True)
    for x in (B, leaf(2, False), B):
        same(compiled(x), FNS[fn](x, B))
    assert vitrify.counters["captures"] == 1


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("fn", FNS)
def test_gradients_of_both(fn, create_graph):
    """Only the gradient of the argument came back."""
    results = []
    for f in (vitrify.compile(lambda x: FNS[fn](x, W), fullgraph=True), lambda x: FNS[fn](x, W)):
        of_each = []
        for x in (W, leaf(2), W):
            out = f(x)
            loss = sum((o * torch.linspace(1, 2, o.numel()).view_as(o)).sum() for o in (out if isinstance(out, tuple) else (out,)))
            gradients = torch.autograd.grad(loss, (W,) if x is W else (x, W), create_graph=create_graph)
            of_each += [g.detach() for g in gradients]
            if create_graph and gradients[0].requires_grad:
                of_each += [g.detach() for g in torch.autograd.grad(gradients[0].pow(2).sum(), W, allow_unused=True) if g is not None]
        results.append(of_each)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, **bounds.SECOND_ORDER)


@pytest.mark.eager("shares memory with input", "which is of the same memory", some=True)
@pytest.mark.parametrize("given_first", [False, True])
def test_written(given_first):
    results = []
    for make in (vitrify.compile, lambda f: f):
        b = B.clone()

        def fn(x):
            x.add_(1)
            return x * b

        f, out = make(fn), []
        for i in range(3):
            x = b if (i == 0) == given_first else leaf(i, False)
            out += [f(x), x.clone(), b.clone()]
        results.append(out)
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
    vitrify.compile(lambda x: x + 1)(B)  # a kernel, where all of them ran eagerly


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
def test_a_tied_weight():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 4)

        def forward(self, index, out):
            return self.embedding(index) @ out.t()

    m, index = Tied(), torch.tensor([1, 2, 2])
    results = []
    for f in (vitrify.compile(m, fullgraph=True), m):
        m.zero_grad()
        f(index, m.embedding.weight).exp().sum().backward()
        results.append(m.embedding.weight.grad.clone())
    torch.testing.assert_close(*results)


@pytest.mark.eager("of an argument that it also reaches by itself", some=True)
@pytest.mark.parametrize("what", ["sets", "reads"])
def test_grad(what):
    """Whose .grad it is differs from call to call."""
    results = []
    for make in (vitrify.compile, lambda f: f):
        w = leaf(5)

        def fn(x):
            if what == "sets":
                (x * 2 + w).sum().backward()
                return x.detach() + 1
            return x.detach() * w.grad

        f, out = make(fn), []
        for i, x in enumerate((w, leaf(6), w, leaf(7))):
            w.grad = torch.full_like(w, i + 1.)
            out.append(f(x).detach())
            out += [w.grad.clone(), torch.zeros(()) if x.grad is None else x.grad.clone()]
        results.append(out)
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
    vitrify.compile(lambda x: x + 1)(B)
