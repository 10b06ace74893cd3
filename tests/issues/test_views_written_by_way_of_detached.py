"""A view of an argument that is written by way of what is detached of it: eager makes the view's history again, from the argument and by strides."""
import pytest
import torch
import vitrify


def permuted(x):
    v = x.permute(2, 1, 0)
    v.detach().mul_(2)
    return v


def masked(x):
    v = x.permute(2, 1, 0)
    d = v.detach()
    d[d > 1] = 0
    return v


def with_another(x):
    v = x.permute(2, 1, 0)
    v.detach().add_(1)
    return v, x * 2


@pytest.mark.eager("returns a view of an argument that it has written since, by way of what is detached of it")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("f", [permuted, masked, with_another])
def test_strides_of_gradients(f, dynamic):
    found = []
    for g in (vitrify.compile(f, dynamic=dynamic), f):
        torch.manual_seed(0)
        x = torch.randn(3, 4, 7, requires_grad=True)
        h = g(x)
        h = h[0] if isinstance(h, tuple) else h
        one, = torch.autograd.grad(h, x, torch.rand(h.shape), retain_graph=True)
        batch, = torch.autograd.grad(h, x, torch.eye(3, h.numel()).view(-1, *h.shape), is_grads_batched=True)
        found.append((h.detach(), one, batch))
    for ours, eager in zip(*found, strict=True):
        assert torch.equal(ours, eager)
        assert ours.stride() == eager.stride()
