"""A product that read what another product's post-op had taken over read it through that op once more: two GELUs for one."""

import pytest
import torch
from torch import nn

import vitrify


@pytest.mark.compiled("the convolution applies it")
@pytest.mark.parametrize("pointwise", [nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid], ids=lambda p: p.__name__)
def test_a_post_op_is_applied_once(pointwise):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), pointwise(), nn.Linear(512, 256), pointwise(), nn.Linear(256, 256))
    x = torch.randn(128, 256)
    compiled, before = vitrify.compile(net), dict(vitrify.counters)
    with torch.no_grad():
        ours, eager = compiled(x), net(x)
        exact = net.double()(x.double())
    assert vitrify.counters["externs_called"] > before["externs_called"] and vitrify.counters["fallbacks"] == before["fallbacks"]
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-7
