"""Gradients that are no strided tensors: eager makes them. What a plan made of them was read as memory, and the process died."""
import pytest
import torch
import vitrify
from torch import nn

pytestmark = pytest.mark.eager("makes a", some=True)


class Sparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t * 2

    @staticmethod
    def backward(ctx, g):
        return g.to_sparse()


def same(a, b):
    assert (a is None) == (b is None)
    if a is not None:
        assert a.layout is b.layout
        torch.testing.assert_close(a.to_dense(), b.to_dense())


@pytest.mark.parametrize("kind", ["leaf", "twice"])
def test_of_a_function(kind):
    grads = []
    for fn in (vitrify.compile(lambda x: Sparse.apply(x).sin()), lambda x: Sparse.apply(x).sin()):
        x = torch.linspace(-1, 1, 12).view(4, 3).requires_grad_(True)
        if kind == "leaf":
            fn(x).sum().backward()
            grads.append(x.grad)
        else:
            grads.append(torch.autograd.grad(fn(x).pow(2).sum(), x, create_graph=True)[0].detach())
    same(*grads)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_of_an_embedding_bag(mode):
    bag = nn.EmbeddingBag(6, 3, sparse=True, mode=mode)
    compiled, grads = vitrify.compile(bag), []
    for fn in (compiled, bag):
        bag.weight.grad = None
        fn(torch.tensor([[0, 1, 1], [3, 0, 5]])).sin().sum().backward()
        grads.append(bag.weight.grad)
    same(*grads)
