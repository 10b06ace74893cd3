"""What needs gradients changes between forward and backward of a checkpoint, in every step: each derivative that is taken for one backward is kept."""
import pytest
import torch
import vitrify
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 80  # more than may be taken so


def train(wrap):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])

    def forward(x):
        for layer in net:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    run, made = wrap(forward), []
    for _ in range(STEPS):
        net[0][0].bias.requires_grad_(False)
        x = torch.ones(2, 4, requires_grad=True)
        out = run(x)
        net[0][0].bias.requires_grad_(True)
        slope, = torch.autograd.grad(out.sum(), x, create_graph=True)
        slope.square().sum().backward()
        made += [x.grad, *(p.grad for p in net.parameters())]
        net.zero_grad()
    return made


@pytest.mark.eager("between the forward and it, in many calls")
def test_it_goes_on_in_eager():
    expected = train(lambda f: f)
    before = vitrify.counters["eager_calls"]
    made = train(vitrify.compile)
    assert [g is None for g in made] == [g is None for g in expected]
    for a, b in zip(made, expected):
        if a is not None:
            torch.testing.assert_close(a, b)
    assert 0 < vitrify.counters["eager_calls"] - before < STEPS
