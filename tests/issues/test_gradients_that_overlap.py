"""A gradient whose elements share memory, as that of an unfold_backward is, has a gradient whose elements do not: copied into such memory, it lost some."""
import pytest
import torch

import vitrify

STEPS = {
    "unfold": lambda t: t.unfold(0, 2, 1),
    "unfold, copied": lambda t: t.unfold(0, 2, 1).contiguous(),
    "unfold of two dims": lambda t: t.expand(2, 4).contiguous().unfold(1, 3, 1).sum(0),
    "unfold in steps": lambda t: t.unfold(0, 3, 1)[:, ::2],
    "as_strided": lambda t: t.as_strided((3, 2), (1, 1)),
    "expanded": lambda t: t[None].expand(3, 4)[:, :2],
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("step", STEPS)
def test_gradients_of_each_order(step, order, dynamic):
    def f(x, w):
        u = STEPS[step](x.square())
        return u * 1, u * w[:u.shape[0], :u.shape[1]]

    def gradient(f):
        x = torch.tensor([1.0, 2, 3, 1.5], dtype=torch.float64, requires_grad=True)
        w = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).requires_grad_()
        a, b = f(x, w)
        t = a.square().sum() + b.square().sum()
        for level in range(order):
            g, = torch.autograd.grad(t, x, create_graph=level + 1 < order)
            t = g.square().sum() if level + 2 < order else g.sum()
        return g

    compiled = vitrify.compile(f, dynamic=True) if dynamic else vitrify.compile(f)
    for _ in range(2):
        torch.testing.assert_close(gradient(compiled), gradient(f), rtol=1e-12, atol=1e-12)
