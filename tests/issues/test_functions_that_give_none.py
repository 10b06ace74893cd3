"""Second order through Functions whose backward gives None for an input: their code runs though its gradients are zeros, and what it reads had not been kept."""
import pytest
import torch
import vitrify


class Nil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x + y, x * 1

    @staticmethod
    def backward(ctx, g, h):
        return None, g


class One(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return None


def twice(x, w):
    u, v = Nil.apply(x, x)
    a, b = Nil.apply(x, v)
    return a @ b.t() @ w, u


def beside(x, w):
    u, v = Nil.apply(x, x)
    a, b = Nil.apply(x, v)
    z = a @ b.t() @ w
    return z, z.tanh()


def alone(x, w):
    v = One.apply(x)
    return (v * w).sin(), v * w, x * 2


def once(x, w):
    u, v = Nil.apply(x, x)
    return v @ v.t() @ w, u


def by_elements(x, w):
    u, v = Nil.apply(x, x)
    a, b = Nil.apply(x, v)
    return a * b * w, u


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("results", [(0,), (0, 1)])
@pytest.mark.parametrize("program", [twice, beside, alone, once, by_elements])
def test_second_order(program, results, captured):
    def told(compile):
        x, w, seen = torch.linspace(0.5, 1.0, 6).view(2, 3).requires_grad_(), torch.linspace(0.7, 1.4, 6).view(2, 3).requires_grad_(), []
        f = compile((lambda x: program(x, w)) if captured else program)
        for _ in range(2):
            ys = f(x) if captured else f(x, w)
            first = torch.autograd.grad([ys[k].sum() for k in results], [x, w], create_graph=True, allow_unused=True)
            again = [g for g in first if g is not None and g.requires_grad]
            second = torch.autograd.grad(sum((g * g).sum() for g in again), [x, w], allow_unused=True) if again else ()
            seen += [*first, *second]
        return seen
    for ours, eager in zip(told(lambda f: vitrify.compile(f, fullgraph=True)), told(lambda f: f), strict=True):
        assert (ours is None) == (eager is None)
        if eager is not None:
            torch.testing.assert_close(ours, eager)
