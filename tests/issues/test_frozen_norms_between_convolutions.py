"""Convolutions train in channels-last memory. A group norm between them of which not all is trained is ATen's in the backward, whose kernel trusts the gradient to lie as the
image does: one of the two was laid out anew, and the gradient's elements came to other places."""
import bounds
import pytest
import torch
import vitrify
from torch import nn

TRAINED = {"all": (True, True), "none": (False, False), "weight": (True, False), "bias": (False, True)}
BETWEEN = {"nothing": nn.Identity, "relu": nn.ReLU, "average": lambda: nn.AvgPool2d(2), "largest": lambda: nn.MaxPool2d(2), "upsampled": lambda: nn.Upsample(scale_factor=2)}


def gradients(net, call, x, weight):
    leaves = [x, *(p for p in net.parameters() if p.requires_grad)]
    out = call(x)
    return [out, *torch.autograd.grad((out * weight[:, :, :out.shape[2], :out.shape[3]]).sum(), leaves)]


def same(net, compiled, x, weight):
    for ours, eager in zip(gradients(net, compiled, x, weight), gradients(net, net, x, weight), strict=True):
        torch.testing.assert_close(ours, eager, **bounds.LAYOUT)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("norm", [lambda: nn.GroupNorm(2, 4), lambda: nn.GroupNorm(4, 4), lambda: nn.BatchNorm2d(4), lambda: nn.InstanceNorm2d(4, affine=True)], ids=["2 groups", "4 groups", "batch", "instance"])
def test_gradients(norm, trained, between, last):
    torch.manual_seed(0)
    for before in (nn.Identity, nn.ReLU, lambda: nn.MaxPool2d(2)):
        net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), before(), norm(), BETWEEN[between](), nn.Conv2d(4, 4, 3, padding=1))
        net[2].weight.requires_grad_(TRAINED[trained][0]), net[2].bias.requires_grad_(TRAINED[trained][1])
        compiled, kernels, eager = vitrify.compile(net), vitrify.counters["kernels_launched"], vitrify.counters["eager_calls"]
        for _ in range(2):
            x, weight = torch.randn(2, 3, 12, 12).requires_grad_(), torch.randn(2, 4, 24, 24)
            if last:
                x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
            same(net, compiled, x, weight)
        assert vitrify.counters["kernels_launched"] > kernels and vitrify.counters["eager_calls"] == eager


@pytest.mark.parametrize("batch, size", [(1, 8), (2, 8), (4, 20)])
def test_without_weights(batch, size):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.GroupNorm(2, 8, affine=False), nn.SiLU(), nn.Conv2d(8, 4, 3, bias=False), nn.GroupNorm(1, 4, affine=False), nn.Conv2d(4, 2, 1))
    compiled, before = vitrify.compile(net), vitrify.counters["kernels_launched"]
    for _ in range(2):
        x, weight = torch.randn(batch, 3, size, size, requires_grad=True), torch.randn(batch, 2, size, size)
        same(net, compiled, x, weight)
    assert vitrify.counters["kernels_launched"] > before
