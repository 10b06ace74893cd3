"""Convolutions and products, which have no out= kernel, leave their results where the plan wants them."""

import pytest
import torch
from torch import nn

import vitrify


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv2d(8, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)

    def forward(self, x):
        x = self.up(x).relu()
        for _ in range(3):
            x = (x + self.norm(self.down(x.relu()))).relu()
        return x * 2


NETS = {
    "residual": (Residual, (2, 8, 16, 16)),
    "result": (lambda: nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU()), (2, 8, 16, 16)),  # the caller's own memory
    "linear": (lambda: nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)), (4, 64, 256)),
}


@pytest.mark.compiled("the library computes all of it")
@pytest.mark.parametrize("name", NETS)
def test_no_result_is_copied(name):
    torch.manual_seed(0)
    make, size = NETS[name]
    net = make().eval()
    x = torch.randn(size)
    compiled, before = vitrify.compile(net), dict(vitrify.counters)
    with torch.no_grad():
        first, eager = compiled(x), net(x)
        kept = first.clone()
        second = compiled(2 * x)
        exact = net.double()(x.double())
    assert vitrify.counters["fallbacks"] == before["fallbacks"]
    assert vitrify.counters["externs_called"] >= before["externs_called"] + 2
    assert vitrify.counters["results_copied"] == before["results_copied"]
    assert first.stride() == eager.stride()
    assert (first - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6 * exact.abs().max()
    assert torch.equal(first, kept) and not torch.equal(first, second)  # the plan's memory is not the caller's


def test_other_allocations_of_the_op_are_untouched():
    """A convolution that first copies its operand into a tensor as large as its result."""
    torch.manual_seed(0)
    net = nn.Conv2d(32, 32, 3, padding=1).eval()
    x = torch.randn(16, 16, 32, 2).permute(3, 2, 0, 1)[..., ::1]
    compiled, before = vitrify.compile(lambda x: net(x.flip(0)).relu() + 1), dict(vitrify.counters)
    with torch.no_grad():
        ours = compiled(x), compiled(x)
        eager = net(x.flip(0)).relu() + 1
    assert vitrify.counters["externs_called"] == before["externs_called"] + 2 and vitrify.counters["fallbacks"] == before["fallbacks"]
    for t in ours:
        torch.testing.assert_close(t, eager)
