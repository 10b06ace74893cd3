"""torch's own backward of a group norm writes the gradient of its input also where that is left out, and ends the process where the input is
channels-last: a program whose input is a leaf of its own, for which eager does ask, has it left out."""
import pytest
import torch
from torch import nn

import vitrify


@pytest.mark.parametrize("shape, layout", [((2, 4, 3, 3), torch.channels_last), ((1, 4, 4, 4, 4), torch.channels_last_3d)], ids=["2d", "3d"])
@pytest.mark.parametrize("affine", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("leaf", [True, False], ids=["own leaf", "no gradient"])
def test_the_process_goes_on(leaf, affine, shape, layout):
    torch.manual_seed(0)
    norm, beside = nn.GroupNorm(2, 4, affine=affine), nn.Linear(shape[-1], 2)

    def f(x, y):
        v = x.clone()
        if leaf:
            v.requires_grad_(True)
        return norm(v), beside(y.sin())

    def gradients(f, x):
        norm.zero_grad(), beside.zero_grad()
        y = torch.linspace(0, 1, shape[-1]).expand(2, -1).requires_grad_()
        a, b = f(x, y)
        ((a * torch.arange(shape[-1])).sum() + b.sum()).backward()
        return [t.grad.clone() for t in (*norm.parameters(), *beside.parameters())]

    compiled = vitrify.compile(f)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(shape)
        expected = gradients(f, x)  # in contiguous memory: in the other, eager ends the process where nobody asks for the input's
        for given in (x, x.to(memory_format=layout)):
            for ours, eager in zip(gradients(compiled, given), expected):
                torch.testing.assert_close(ours, eager)
