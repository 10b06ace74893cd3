"""A gradient of a gradient through a checkpoint whose function first computes what the result does not need: what only that is made of nobody has kept."""
import pytest
import torch
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

import vitrify


def again(f, *args):
    return checkpoint(f, *args, use_reentrant=False)


PROGRAMS = {
    "the first result": lambda x, w: again(lambda p, q: (p.exp(), q.sin()), x, w)[0],
    "the second result": lambda x, w: again(lambda p, q: (q.sin(), p.exp()), x, w)[1],
    "within": lambda x, w: again(lambda p, q: (q.sin(), p.exp())[1], x, w),
    "of a product": lambda x, w: again(lambda p, q: (q.sin(), p.exp()), x, x * w)[1],
    "of both": lambda x, w: again(lambda p, q: ((p * q).sin(), p.exp()), x, w)[1],
    "of one": lambda x, w: again(lambda p: (p.sin(), p.exp()), x)[1],
    "dropout": lambda x, w: again(lambda p: (torch.nn.functional.dropout(p), p.exp()), x)[1],
    "products": lambda x, w: again(lambda p, q: ((p @ q.t()).relu(), (p @ q.t()).tanh()), x, w)[1],
}


def gradients(f, to):
    torch.manual_seed(0)
    given = {"x": torch.randn(3, 3, requires_grad=True), "w": torch.randn(3, 3, requires_grad=True)}
    ins = [given[name] for name in to]
    first = [t for t in grad(f(**given).sum(), ins, create_graph=True, allow_unused=True) if t is not None]
    return first, grad(sum(t.square().sum() for t in first), ins, allow_unused=True)


@pytest.mark.parametrize("to", ["x", "xw"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_of_second_order(name, to):
    compiled = vitrify.compile(PROGRAMS[name])
    for _ in range(2):
        torch.testing.assert_close(gradients(compiled, to), gradients(PROGRAMS[name], to))
