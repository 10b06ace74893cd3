"""Libraries read a bias as dense: one that is a column, a slice or expanded was read as its neighbours in memory, and beyond its end."""
import bounds
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch import nn

BIASES = {
    "every other": lambda n: torch.arange(2.0 * n)[::2], "expanded": lambda n: torch.full((1,), 3.0).expand(n), "column": lambda n: torch.arange(3.0 * n).view(n, 3)[:, 1],
    "copied": lambda n: torch.arange(2.0 * n)[::2].clone(),
}
LAYERS = {
    "convolution": (lambda: nn.Conv2d(3, 8, 3, padding=1), lambda: torch.rand(1, 3, 6, 6)), "1x1": (lambda: nn.Conv2d(3, 8, 1, stride=2), lambda: torch.rand(2, 3, 5, 5)),
    "linear": (lambda: nn.Linear(64, 2000), lambda: torch.rand(512, 64)),
}


@pytest.mark.parametrize("after", [lambda y: y * 1.5, lambda y: F.relu(y) - 1, lambda y: F.relu(y + y.abs()) * 2], ids=["alone", "relu", "sum"])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_frozen_bias(layer, bias, after):
    make, given = LAYERS[layer]
    m, x = make().requires_grad_(False), given()
    m.bias = nn.Parameter(BIASES[bias](m.bias.numel()), requires_grad=False)
    compiled = vitrify.compile(lambda x: after(m(x)))
    for _ in range(2):
        torch.testing.assert_close(compiled(x), after(m(x)))
        with torch.no_grad():
            m.bias.data = m.bias * 2 if bias == "copied" else BIASES[bias](m.bias.numel())


@pytest.mark.parametrize("copy", [lambda b: b, torch.Tensor.contiguous], ids=["as it is", "contiguous"])
@pytest.mark.parametrize("bias", BIASES)
def test_a_given_bias(bias, copy):
    f = lambda x, w, b: F.linear(x, w, copy(b)) + 1  # noqa: E731
    x, w, b = torch.rand(512, 64), torch.rand(2000, 64), BIASES[bias](2000)
    for dynamic in (False, True):
        torch.testing.assert_close(vitrify.compile(f, dynamic=dynamic)(x, w, b), f(x, w, b), **bounds.DEEP_CONVOLUTIONS)


@pytest.mark.parametrize("out", [lambda: torch.zeros(8, 2).t(), lambda: torch.zeros(2, 16)[:, ::2]], ids=["transposed", "sliced"])
@pytest.mark.parametrize("draw", [lambda p, o: torch.bernoulli(p, out=o), lambda p, o: torch.normal(p, 1.0, out=o)], ids=["bernoulli", "normal"])
@pytest.mark.eager("draws in the order of the memory that it is given")
def test_draws_into_memory_of_another_order(draw, out):
    """Other numbers, and another state of the generator."""
    told = []
    for make in (vitrify.compile, lambda f: f):
        f, o = make(lambda p, o: (draw(p, o) * 1, torch.rand(2))), out()
        torch.manual_seed(3)
        told.append([*f(torch.full((2, 8), 0.5), o), o])
    for a, b in zip(*told):
        assert torch.equal(a, b)


WEIGHTS = {
    "rows": lambda w: w[:1].expand_as(w), "channels": lambda w: w[:, :1].expand_as(w), "pixels": lambda w: w[..., :1, :1].expand_as(w),
    "all": lambda w: w[:1, :1, :1, :1].expand_as(w), "every other": lambda w: torch.stack([w, w], -1).flatten(-2)[..., ::2],
    "transposed": lambda w: w.transpose(2, 3).contiguous().transpose(2, 3), "channels last": lambda w: w.contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_norm_folded_into_a_weight(weight, kernel):
    """The folded weight was said to lie as the weight does, where its elements cannot share memory."""
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(3, 24, kernel), nn.BatchNorm2d(24), nn.ReLU()).eval()
    m[0].weight, m[1].running_mean[:] = nn.Parameter(WEIGHTS[weight](m[0].weight.detach())), torch.rand(24)
    x, compiled = torch.rand(1, 3, 5, 5), vitrify.compile(nn.Sequential(m, nn.Softmax(1)))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), m(x).softmax(1))
