"""Functions whose backward takes gradients of what it has detached itself, as a reentrant checkpoint or a fixed-point layer does: derivatives of it, kept with create_graph=True,
took what it had made for what was there before, and raised."""
import pytest
import torch
import vitrify
from torch.autograd import Function, grad


class Detached(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        with torch.enable_grad():
            q = x.detach().requires_grad_()
            d, = grad(q.sin().sum(), q)
        return g * d


class Cloned(Detached):
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        with torch.enable_grad():
            q = (x * 1.0).detach().requires_grad_()
            d, = grad(q.sin().sum(), q, create_graph=True)
            e, = grad(d.sum(), q)
        return g * d.detach() - 0 * e


class Product(Detached):
    """With torch's own double backward."""
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        _, d = torch.autograd.functional.jvp(torch.sin, x.detach(), torch.ones_like(x))
        return g * d


@pytest.mark.parametrize("before", [False, True], ids=["of the argument", "of a value"])
@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("function", [Detached, Cloned, Product], ids=lambda f: f.__name__)
def test_orders(function, order, before):
    def told(compile):
        f = compile(lambda x: function.apply(x * 1.5 if before else x) * x ** 3)
        seen = []
        for k in range(3):
            x = torch.tensor([0.1, 0.2 + k], dtype=torch.float64, requires_grad=True)
            y = f(x)
            for n in range(order):
                y, = grad(y.sum(), x, create_graph=n + 1 < order)
                seen.append(y.detach())
        return seen
    torch.testing.assert_close(told(vitrify.compile), told(lambda f: f))
