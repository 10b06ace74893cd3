"""A gradient that a Function of the backward returns as a view of memory that it made itself has the history of the Function."""
import pytest
import torch
import vitrify
from torch.autograd import Function, grad


class SumGrad(Function):
    @staticmethod
    def forward(ctx, g, n):
        return (g * 2).unsqueeze(-1).expand(*g.shape, n)

    @staticmethod
    def backward(ctx, gg):
        return gg.sum(-1) * 2, None


class Sum(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.n = x.shape[-1]
        return x.sum(-1) * 2

    @staticmethod
    def backward(ctx, g):
        return SumGrad.apply(g, ctx.n)


class TurnedGrad(Function):
    @staticmethod
    def forward(ctx, g):
        return (g * 2).conj()

    @staticmethod
    def backward(ctx, gg):
        return gg.conj() * 2


class Turned(Function):
    @staticmethod
    def forward(ctx, x):
        return x.conj().resolve_conj() * 2

    @staticmethod
    def backward(ctx, g):
        return TurnedGrad.apply(g)


def expanded(x):
    return Sum.apply(x) ** 2


def turned(x):
    return Turned.apply(x) ** 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("f, dtype", [(expanded, torch.float32), (turned, torch.complex64)])
def test_history(f, dtype, dynamic):
    compiled = vitrify.compile(f, dynamic=dynamic)
    for n in (3, 4, 3):
        told = []
        for run in (f, compiled):
            torch.manual_seed(n)
            x = torch.randn(2, n, dtype=dtype, requires_grad=True)
            (q,) = grad(run(x).abs().sum(), x, create_graph=True)
            assert q.requires_grad
            told.append((q.detach().resolve_conj(), grad(q.abs().pow(2).sum(), x)[0]))
        torch.testing.assert_close(told[1], told[0])


def test_hessian():
    x = torch.randn(2, 3)
    compiled = vitrify.compile(expanded)
    eager, ours = (torch.autograd.functional.hessian(lambda x, run=run: run(x).sum(), x) for run in (expanded, compiled))
    torch.testing.assert_close(ours, eager)
