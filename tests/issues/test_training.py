"""Bugs of training, once fixed."""
import torch
import vitrify


def test_gradients_come_back_through_an_alias():
    """A result that aliases another is a view that gradients follow, not a detached one."""
    def fn(x):
        y = x.exp()
        return y, torch.ops.aten.alias(y)
    grads = []
    for f in (fn, vitrify.compile(fn, fullgraph=True)):
        x = torch.full((3,), 0.5, requires_grad=True)
        a, b = f(x)
        assert b.requires_grad and b._base is a
        grads += torch.autograd.grad([a, b], [x], [torch.ones(3), torch.full((3,), 10.0)])
    torch.testing.assert_close(*grads)
    assert vitrify.counters["kernels_launched"] > 0


def test_writes_through_an_alias():
    def fn(x):
        y = x * 2
        torch.ops.aten.alias(y).add_(1)
        return y
    x = torch.arange(3.0)
    assert torch.equal(vitrify.compile(fn, fullgraph=True)(x), fn(x)) and vitrify.counters["kernels_launched"] > 0
