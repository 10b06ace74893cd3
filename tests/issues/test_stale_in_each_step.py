"""What a checkpoint finds changes between forward and backward in every step. What needs gradients by then says which derivative serves; where Python's state is another, each is for one backward, and the trace keeps it."""
import pytest
import torch
import vitrify
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 80  # more than may be taken so


def thaw(net, step):
    net[0][0].bias.requires_grad_(True)


def by_turns(net, step):
    net[step % 2][0].bias.requires_grad_(step % 2 == 0)


def scale(net, step):
    net[0].scale = 2.0 + step


def train(wrap, change, again):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])

    def forward(x):
        for layer in net:
            x = checkpoint(lambda x, layer=layer: (layer(x) * layer.scale).sin(), x, use_reentrant=False)
        return x

    run, made = wrap(forward), []
    for step in range(STEPS):
        net.requires_grad_(True)
        net[0][0].bias.requires_grad_(False)
        net[0].scale = net[1].scale = 1.0
        x = torch.ones(2, 4, requires_grad=True)
        out = run(x)
        change(net, step)
        if again:
            slope, = torch.autograd.grad(out.sum(), x, create_graph=True)
            slope.square().sum().backward()
        else:
            out.square().sum().backward()
        made += [x.grad, *(p.grad for p in net.parameters())]
        net.zero_grad()
    return made


def both(change, again):
    """How many calls ran eagerly."""
    expected = train(lambda f: f, change, again)
    before = vitrify.counters["eager_calls"]
    made = train(vitrify.compile, change, again)
    assert [g is None for g in made] == [g is None for g in expected]
    for a, b in zip(made, expected):
        if a is not None:
            torch.testing.assert_close(a, b)
    return vitrify.counters["eager_calls"] - before


@pytest.mark.parametrize("again", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("change", [thaw, by_turns], ids=lambda f: f.__name__)
@pytest.mark.eager("op by op: what they read is changed", some=True)
def test_what_needs_gradients(change, again):
    assert both(change, again) == 0


@pytest.mark.eager("between the forward and it, in many calls")
@pytest.mark.eager("op by op: what they read is changed", some=True)
def test_another_number_goes_on_in_eager():
    assert 0 < both(scale, False) < STEPS
