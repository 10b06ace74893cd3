"""A leaf adds to its .grad in place: where a call gives leaves a gradient and views of it, each has memory of its own. They counted each other's gradients."""
import pytest
import torch
import vitrify
from torch import nn
from torch.utils.checkpoint import checkpoint

SUMS = {"view": lambda w, b: w.view(-1) + b, "sin": lambda w, b: (w.view(-1) + b).sin(), "product": lambda w, b: (w.view(-1) + b) * 2, "turned": lambda w, b: b + w.view(-1), "unsqueezed": lambda w, b: (w[None] + b).exp(), "less": lambda w, b: w.view(-1) - b,
        "reshaped": lambda w, b: w.reshape(1, 3) + b}
BESIDE = {"nothing": lambda w, b: (), "b": lambda w, b: (b * 2,), "w": lambda w, b: (w * 2,), "both": lambda w, b: (w.exp(), b.exp())}
BACK = {"sum": lambda y: y[0].sum().backward(), "both": lambda y: (y[0].sum() + y[0].sin().sum()).backward(), "given": lambda y: y[0].backward(torch.arange(3.0).view(y[0].shape)), "all": lambda y: sum((t.sin() + t).sum() for t in y).backward(),
        "sin": lambda y: y[0].sin().sum().backward(), "kept": lambda y: y[0].sin().sum().backward(retain_graph=True)}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("first", [False, True], ids=["beside it behind", "beside it first"])
@pytest.mark.parametrize("back", BACK)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("name", SUMS)
def test_steps(name, beside, back, first):
    def told(compile):
        w, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))

        def program():
            made = BESIDE[beside](w, b) if first else None
            total = SUMS[name](w, b)
            return (total, *(made if first else BESIDE[beside](w, b)))
        f, seen = compile(program), []
        for _ in range(3):
            BACK[back](f())
            seen += [[round(x, 4) for x in t.grad.tolist()] for t in (w, b)]
        return seen, w.grad.data_ptr() == b.grad.data_ptr()
    assert told(lambda f: vitrify.compile(f, fullgraph=True)) == told(lambda f: f)


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return a + b

    @staticmethod
    def backward(ctx, g):
        return g, g


SIZES = {"w": (2, 4), "b": (8,), "c": (2, 4), "d": (4, 2)}
LEVELS = {
    "twice": lambda w, b: (w.view(-1) + b).view(2, 4) * 2, "tangent": lambda w, b, c: (w.view(-1) + b).view(2, 4) + c, "levels": lambda w, b, c, d: (((w.view(-1) + b).view(2, 4) + c).view(4, 2) + d).sin(), "sin": lambda w, b, c: ((w.view(-1) + b).view(2, 4) + c).sin(),
    "cat": lambda w, b, c: torch.cat([c.view(-1) * 2, w.view(-1) + b]).sin(), "stack": lambda w, b, c: torch.stack([w.view(-1) + b, c.view(-1)]).exp(), "function": lambda w, b, c: (Sum.apply(w.view(-1), b).view(2, 4) + c) * 2, "dropout": lambda w, b, c: (torch.dropout(w.view(-1) + b, 0.0, True).view(2, 4) + c) * 2,
    "flatten": lambda w, b, c: ((w + c).flatten() + b) * 2, "unsqueezed": lambda w, b, c: (((w + c)[None]).view(1, 8) + b[None]) * 2, "reshaped": lambda w, b, c: ((w + c).reshape(8) + b) * 2, "checkpoint": lambda w, b, c: checkpoint(lambda t: ((t.view(-1) + b).view(2, 4) + c) * 2, w, use_reentrant=False),
    "padded": lambda w, b, c: (nn.functional.pad(w.view(-1) + b, (0, 0)).view(2, 4) + c) * 2, "repeated": lambda w, b, c: ((w.view(-1) + b).repeat(1).view(2, 4) + c) * 2, "written": lambda w, b, c: (b * 1).add_(w.view(-1)).view(2, 4).add_(c) * 2, "transposed": lambda w, b, d: ((w.t() + d).t().reshape(-1) + b) * 2,
    "product": lambda w, b, c, d: (w.view(-1) + b).view(4, 2).sigmoid() * (c.view(-1) + 1).view(4, 2) * d, "two results": lambda w, b, c: ((w.view(-1) + b).view(2, 4) + c).unbind(0)[0] * 2, "parts": lambda w, b: torch.cat([w.view(-1), b]) * 2,
    # Of these eager counts the gradients of each twice.
    "views of two": lambda w, b: (w.view(4, 2) + b.view(4, 2)) * 2, "views of tangents": lambda w, b: w.view(4, 2) + b.view(4, 2), "view of each": lambda w, c: w[None].mT + c.t()[None], "view and turned": lambda w, d: w.view(-1) + d.view(-1),
    "beside another": lambda w, b, c: (lambda h: torch.stack([h, h * 3]))(((w * 2) + c).reshape(-1) + b),
}


@pytest.mark.parametrize("at", ["leaves", "one is made outside", "captured"])
@pytest.mark.parametrize("given", ["sum", "given"])
@pytest.mark.parametrize("name", LEVELS)
def test_levels(name, given, at):
    """What eager gives each by itself, so many times; and each .grad is changed alone."""
    f = LEVELS[name]
    names = f.__code__.co_varnames[:f.__code__.co_argcount]
    some = [nn.Parameter(torch.arange(1.0, 9.0).view(SIZES[n]) / (i + 7)) for i, n in enumerate(names)]

    def total(run):
        xs = [t * 1 if at == "one is made outside" and i == 1 else t for i, t in enumerate(some)]
        y = run() if at == "captured" else run(*xs)
        return y.sum() if given == "sum" else (y * torch.arange(float(y.numel())).view(y.shape)).sum()
    once = torch.autograd.grad(total(lambda *xs: f(*(xs or some))), some)
    compiled = vitrify.compile((lambda: f(*some)) if at == "captured" else f, fullgraph=True)
    for number in range(3):
        total(compiled).backward()
        for t, g in zip(some, once):
            torch.testing.assert_close(t.grad, g * (number + 1))
    for t, g in zip(some, once):  # as by who clips by hand
        t.grad.mul_(0.5)
    for t, g in zip(some, once):
        torch.testing.assert_close(t.grad, g * 1.5)


def test_what_is_not_a_leaf_is_not_copied():
    """Two values from outside have the tangent itself and a view of it, as in eager."""
    def told(compile):
        f, kept = compile(lambda h, r: h.view(-1) + r), []
        w, b = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(8))
        h, r = w * 2, b * 2
        h.register_hook(lambda g: kept.append(g.data_ptr()))
        r.register_hook(lambda g: kept.append(g.data_ptr()))
        f(h, r).sin().sum().backward()
        return len(set(kept))
    assert told(lambda f: vitrify.compile(f, fullgraph=True)) == told(lambda f: f) == 1
