"""Ops that write to a tensor which is another argument as well: they read what they have written by then."""
import pytest
import torch
import vitrify
from compare import same


def given(seed=0, shape=(4, 6), needs=True):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_(needs)


def masked(x):
    y = x * 2
    y.masked_scatter_(y > 0, y)
    return y, y.sin()


def permuted(x):
    y = (x * 2).t()
    y.masked_scatter_(y > 0, y)
    return y + 1, y.cos()


def permuted_memory(x):
    y = torch.empty_like(x.t()).t().copy_(x) * 2
    y = y.t()
    y.masked_scatter_(y > 0, y)
    return y + 1


def of_a_copy(x):
    """Not the same memory, though the same elements."""
    y = x * 2
    z = y.clone()
    y.masked_scatter_(y > 0, z)
    return y, z


def both(x):
    y = x * 2
    z = y.clone()
    y.masked_scatter_(y > 0, y)
    z.masked_scatter_(z > 0, z.clone())
    return y - z, y * z


def given_back(x):
    y = x.detach().clone()
    z = y.view(-1)
    y.masked_scatter_(y > 0, y)
    return y, z, x * y


def of_a_part(x):
    y = x * 2
    y[1:3].masked_scatter_(y[1:3] < 0, y[1:3])
    return y


PROGRAMS = {f.__name__: f for f in (masked, permuted, permuted_memory, of_a_copy, both, given_back)}


def steps(f, needs):
    told = []
    for k in range(3):
        x = given(k, needs=needs)
        out = f(x)
        out = out if isinstance(out, tuple) else (out,)
        told += [(o.detach().clone(), o.stride(), o.requires_grad) for o in out]
        if any(o.requires_grad for o in out):
            first = torch.autograd.grad(sum((o * o.detach().cos()).sum() for o in out if o.requires_grad), x, create_graph=True)[0]
            told.append(first.detach())
    return told


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name, needs, dynamic):
    same(steps(vitrify.compile(PROGRAMS[name], dynamic=dynamic), needs), steps(PROGRAMS[name], needs))


def argument(x, y):
    x.masked_scatter_(x > 0, x)
    return x * 2 + y


def test_arguments():
    for k in range(3):
        a, b = given(k, needs=False), given(k, needs=False)
        version = a._version
        same(vitrify.compile(argument)(a, a.clone()), argument(b, b.clone()))
        same(a, b)
        assert a._version - version == b._version - version


def strided(x):
    x[:, ::2].masked_scatter_(x[:, ::2] > 0, x[:, ::2])
    return x * 2


@pytest.mark.eager("aten::masked_scatter_ writes over an argument")
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
@pytest.mark.parametrize("program", [of_a_part, strided])
def test_of_other_tensors(program):
    """Several tensors look at that memory, or what is copied would lie otherwise."""
    same(vitrify.compile(program)(given(needs=False)), program(given(needs=False)))
