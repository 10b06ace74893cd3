"""A batch norm folded into a convolution that no library call takes, whose product leaves the range of floats where the two factors do not: the norm itself runs. It gave infinities."""
import pytest
import torch
import vitrify
from torch import nn

CASES = {"weights": ({"w": 1e25, "g": 1e20}, 1e-22), "biases": ({"b": 3e38, "running_mean": -3e38, "g": 1e-5}, 1.0), "an infinite weight": ({"g": float("inf")}, 1.0), "a large weight": ({"g": 1e38}, 0.01),
         "an infinite variance": ({"running_var": float("inf")}, float("inf")), "nothing": ({}, 1.0)}


@pytest.mark.no_kernels("the convolution is ATen's, with the norm in its weights")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("dims, stride", [(1, 1), (2, 1), (2, 3), (3, 1)])
@pytest.mark.parametrize("case", CASES)
def test_folded(case, dims, stride, dynamic):
    values, size = CASES[case]
    torch.manual_seed(0)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 4, 3, stride=stride)
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](4)
    net = nn.Sequential(conv, norm).eval().requires_grad_(False)
    for name, value in values.items():
        {"w": conv.weight, "b": conv.bias, "g": norm.weight}.get(name, getattr(norm, name, None)).fill_(value)
    compiled = vitrify.compile(net, dynamic=dynamic)
    for n in (9, 12, 9):
        x = torch.rand(2, 4, *[n] * dims) * size
        x[0].zero_()
        for _ in range(2):
            ours, theirs = compiled(x), net(x)
            assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isinf(), theirs.isinf()), n
