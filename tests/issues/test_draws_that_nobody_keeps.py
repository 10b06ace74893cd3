"""Random numbers of a size that follows from content, which no derivative reads: a gradient of a gradient took the size from them, of which nobody has kept any."""
import pytest
import torch

import vitrify

PROGRAMS = {
    "not read": lambda x, y: (x * 2, torch.rand(y.nonzero().shape))[0],
    "behind a copy": lambda x, y: (x.clone(), torch.randn(torch.where(y > 0)[0].shape))[0],
    "read beside": lambda x, y: (x.sin(), torch.randn(y.nonzero().shape) * 2)[0],
    "a result": lambda x, y: (x.sin() * 2, torch.randn(y.nonzero().shape)),
    "added": lambda x, y: x[y > 0].sin() + torch.randn(x[y > 0].shape, dtype=x.dtype),
    "multiplied": lambda x, y: (x[y > 0] * torch.randn(x[y > 0].shape, dtype=x.dtype)).sin(),
    "multiplied by a part": lambda x, y: (x[y > 0].exp() * torch.randn(x[y > 0].shape, dtype=x.dtype))[:1].sin() * x.sum(),
}


def gradients(f, x, y):
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    out = f(x, y)
    out = out[0] if isinstance(out, tuple) else out
    first, = torch.autograd.grad((out.sin() * 3).sum(), x, create_graph=True)
    second, = torch.autograd.grad(first.square().sum(), x)
    return out, first, second, torch.get_rng_state()


@pytest.mark.parametrize("name", PROGRAMS)
def test_of_second_order(name):
    compiled = vitrify.compile(PROGRAMS[name])
    for n in (3, 4, 3, 6):
        torch.manual_seed(n)
        x, y = torch.randn(n, dtype=torch.float64), torch.randn(n)
        torch.testing.assert_close(gradients(compiled, x, y), gradients(PROGRAMS[name], x, y))
