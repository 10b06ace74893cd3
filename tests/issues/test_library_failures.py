"""What a library does not do though ATen's ops do is no error of the user's: those ops run in the call's place. Sizes and strides at the edges of what libraries take, with frozen weights."""
import itertools

import pytest
import torch
import torch.nn.functional as F
import vitrify
from beside import calls_of, check
from torch import nn


def frozen(module):
    torch.manual_seed(0)
    for p in module.parameters():
        p.requires_grad_(False)
    return module.eval()


CONV1 = frozen(nn.Conv2d(8, 8, 1))
LAYOUTS = {
    "dense": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "sliced": lambda x: torch.cat([x, x], 1)[:, ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "odd strides of ones": lambda x: x.as_strided(x.shape, [7 if n == 1 else s for n, s in zip(x.shape, x.stride())]),
}


def image(shape, layout):
    def make():
        torch.manual_seed(1)
        return [LAYOUTS[layout](torch.randn(shape))]
    return make


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 8, 1, 1), (4, 8, 1, 1), (1, 8, 1, 5), (2, 8, 5, 1), (1, 8, 4, 4)], ids=str)
def test_sums_with_convolutions_of_pixels(shape, layout):
    check(lambda y: (y + CONV1(y)).relu() * 2, image(shape, layout))
    check(lambda y: CONV1(y.relu()) + y, image(shape, layout))


CONVOLUTIONS = {
    "1x1": lambda: nn.Conv2d(16, 16, 1),
    "3x3": lambda: nn.Conv2d(16, 16, 3, padding=1),
    "strided": lambda: nn.Conv2d(16, 16, 3, stride=3, padding=1),
    "depthwise": lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16),
    "many for one": lambda: nn.Conv2d(16, 32, 3, padding=1, groups=16),
    "grouped": lambda: nn.Conv2d(16, 32, 3, padding=1, groups=4),
    "dilated": lambda: nn.Conv2d(16, 16, 3, padding=60, dilation=60),
    "more padding than image": lambda: nn.Conv2d(16, 16, 2, padding=9),
    "large kernel": lambda: nn.Conv2d(16, 4, (1, 31), padding=(0, 15)),
    "no bias": lambda: nn.Conv2d(16, 16, 3, padding=1, bias=False),
    "one channel": lambda: nn.Conv2d(16, 1, 3, padding=1),
}
SHAPES = [(1, 16, 1, 1), (2, 16, 1, 7), (1, 16, 8, 8), (0, 16, 4, 4)]


@pytest.mark.parametrize("conv", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("layout", ["dense", "channels_last", "expanded", "odd strides of ones"])
def test_convolutions(conv, layout):
    conv = frozen(conv())
    norm = frozen(nn.BatchNorm2d(conv.out_channels))
    norm.running_mean.normal_()
    for shape in SHAPES:
        check(lambda x: norm(conv(x)).relu() * 2, image(shape, layout), launches=shape[0] > 0)


@pytest.mark.parametrize("rows, inner, columns", itertools.product([0, 1, 3, 64], [0, 1, 300], [1, 300]))
def test_products(rows, inner, columns):
    layer = frozen(nn.Linear(max(inner, 1), columns))
    weight = layer.weight if inner else torch.zeros(columns, 0)

    def given():
        torch.manual_seed(1)
        return [torch.randn(rows, inner)]
    check(lambda x: F.gelu(F.linear(x.relu(), weight, layer.bias)) + 1, given, launches=rows > 0)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced", "unaligned"])
def test_products_of_other_strides(layout):
    layer = frozen(nn.Linear(300, 300))

    def given():
        torch.manual_seed(1)
        x = torch.randn(64, 300)
        return [{"transposed": lambda: x.t().contiguous().t(), "expanded": lambda: x[:1].expand(64, 300), "sliced": lambda: torch.cat([x, x], 1)[:, ::2],
                 "unaligned": lambda: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(64, 300)}[layout]()]
    check(lambda x: F.relu(layer(x)) + 1, given)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.n = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.n.running_mean.normal_()

    def forward(self, x):
        return self.n(self.b((x + self.a(x)).relu())) * 2


def test_other_sizes_of_one_program():
    module = frozen(Chain())
    compiled = vitrify.compile(module, dynamic=True)
    before = dict(vitrify.counters)
    with torch.no_grad():
        for shape in [(2, 8, 4, 4), (3, 8, 5, 4), (1, 8, 1, 1), (4, 8, 1, 1), (2, 8, 1, 3), (2, 8, 4, 4)]:
            x = torch.randn(shape)
            for layout in (lambda y: y, lambda y: y.contiguous(memory_format=torch.channels_last)):
                ours, theirs = compiled(layout(x)), module(layout(x))
                assert ours.stride() == theirs.stride()
                torch.testing.assert_close(ours, theirs)
    assert vitrify.counters["fallbacks"] == before["fallbacks"] and vitrify.counters["kernels_launched"] > before["kernels_launched"]


@pytest.mark.compiled("a convolution and its sum are one call of oneDNN, or two of ATen's in its place")
def test_the_call_that_fails_is_one_of_a_library():
    compiled = vitrify.compile(lambda y: y + CONV1(y))
    y = torch.randn(4, 8, 1, 1).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(y), y + CONV1(y))
    assert any(name.startswith("mkldnn::") for name in calls_of(compiled))
