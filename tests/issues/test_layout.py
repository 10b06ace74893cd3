"""Convolutions train in channels-last memory, whatever the user's tensors have; and the kernels that make such copies."""
import copy

import bounds
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch import nn

pytestmark = pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")


class Net(nn.Module):
    """Two results, so that gradients may come back through one; a slice of channels, groups, a pool, a flattened image."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.part = nn.Conv2d(8, 16, 3, padding=1)
        self.groups = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.pixel = nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(8 * 6 * 6, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        y = x + self.groups(F.gelu(self.part(x[:, 4:12])))
        return y, self.head(torch.sigmoid(self.pixel(y)).flatten(1))


def gradients(f, module, x, which):
    module.zero_grad()
    x = x.detach().requires_grad_()
    out = f(x)
    sum((out[i] * torch.arange(out[i].numel(), dtype=out[i].dtype).view_as(out[i]).sin()).sum() for i in which).backward()
    return [*(t.detach() for t in out), x.grad, *(p.grad for p in module.parameters()), *(b.clone() for b in module.buffers())]


def check(mine, theirs, exact):
    for a, b, r in zip(mine, theirs, exact):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert a.stride() == b.stride() and a.dtype == b.dtype
        largest = r.abs().max().clamp_min(1)
        assert (a - r).abs().max() / largest <= 3 * (b - r).abs().max() / largest + 1e-6


@pytest.mark.parametrize("which", [(0, 1), (0,), (1,)], ids=["both", "first", "second"])
def test_a_network(which):
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 1, 24, 24)
    ours, wide = copy.deepcopy(net), copy.deepcopy(net).double()
    compiled = vitrify.compile(ours)
    for _ in range(2):
        check(gradients(compiled, ours, x, which), gradients(net, net, x, which), gradients(wide, wide, x.double(), which))
    assert vitrify.counters["eager_calls"] == vitrify.counters["fallbacks"] == 0 and vitrify.counters["kernels_launched"] > 0
    assert vitrify.metrics()["compile_us"].get("conv_layout", 0) > 0


def test_gradients_of_gradients():
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(3, 1, 24, 24, dtype=torch.float64)
    for dtype, bound in ((torch.float64, {"rtol": 1e-9, "atol": 1e-9}), (torch.float32, bounds.LAYOUT_TWICE)):
        results = []
        for compiled in (False, True):
            m = copy.deepcopy(net).to(dtype)
            z = x.to(dtype).requires_grad_()
            g, = torch.autograd.grad((vitrify.compile(m) if compiled else m)(z)[1].square().sum(), z, create_graph=True)
            g.square().sum().backward()
            results.append([z.grad, *(p.grad for p in m.parameters())])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, **bound)
    assert vitrify.counters["fallbacks"] == 0 and vitrify.counters["kernels_launched"] > 0


def test_saved_tensors_are_seen_by_hooks_as_they_are_kept():
    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 1, 24, 24)
    ours = copy.deepcopy(net)
    compiled = vitrify.compile(ours)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(vitrify.mark_lossless(lambda t: kept.append(t) or t.clone()), lambda t: t):
        mine = gradients(compiled, ours, x, (0, 1))
    assert any(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous() for t in kept)
    assert vitrify.counters["fallbacks"] == 0 and vitrify.counters["kernels_launched"] > 0
    for a, b in zip(mine, gradients(net, net, x, (0, 1))):
        torch.testing.assert_close(a, b, **bounds.LAYOUT)


def test_few_channels_strided():
    """What eager itself dies of in channels-last memory: the derivative of a strided 1x1 convolution of few channels."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 12, 1, 2), nn.ReLU(), nn.Conv2d(12, 48, 1, 2), nn.ReLU(), nn.Conv2d(48, 8, 3, padding=1))
    ours, wide, x = copy.deepcopy(net), copy.deepcopy(net).double(), torch.randn(2, 3, 192, 192)
    compiled = vitrify.compile(ours)
    for _ in range(10):
        check(*(gradients(lambda x, f=f: (f(x),), m, t, (0,)) for f, m, t in ((compiled, ours, x), (net, net, x), (wide, wide, x.double()))))
    assert vitrify.counters["fallbacks"] == 0 and vitrify.counters["kernels_launched"] > 0


@pytest.mark.parametrize("step", [2, 3, 5, 8, 9, 15, 16, 17, 33])
def test_every_so_many_elements(step):
    x = torch.randn(7, 70 * step)
    t, u = torch.randn(5, 40, step), torch.randn(5, step, 40)
    for name, f, arg in (("slice", lambda x: x[:, ::step] * 2, x), ("backwards", lambda x: x[:, ::step].flip(1) * 2, x),
                         ("narrow to wide", lambda x: x.transpose(1, 2).contiguous() * 2, t), ("wide to narrow", lambda x: (x.transpose(1, 2) * 2).contiguous(), u)):
        compiled = vitrify.compile(f)
        for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool):
            a = arg.to(dtype) if dtype is not torch.bool else arg > 0
            mine, eager = compiled(a), f(a)
            assert torch.equal(mine, eager) and mine.stride() == eager.stride(), (name, dtype)
    assert vitrify.counters["fallbacks"] == 0 and vitrify.counters["kernels_launched"] >= 20


@pytest.mark.parametrize("offset", [0, 3, 100])
@pytest.mark.parametrize("shape", [(4, 64, 56, 56), (32, 24, 28, 7), (2, 512, 2, 2), (1, 3, 300, 301)])
def test_statistics_of_channels_that_lie_closest(shape, offset):
    """They were farther from fp64 than those of contiguous images: thousands of steps of one recurrence."""
    torch.manual_seed(0)
    x = (torch.randn(shape) + offset).contiguous(memory_format=torch.channels_last)
    f = lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)  # noqa: E731
    mine, wide = vitrify.compile(f)(x), f(x.double())
    plain = f(x.contiguous())
    distance = lambda t: (t.double() - wide).square().mean().sqrt().item()  # noqa: E731
    assert distance(mine) <= 2 * distance(plain) + 1e-8 + offset * torch.finfo(torch.float32).eps  # a mean is a float32 here
    assert vitrify.counters["fallbacks"] == 0 and vitrify.counters["kernels_launched"] > 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_filling_keeps_the_strides_of_one_element(dtype):
    """0.5 written to integers: the strides of dims of one element became those of a new tensor."""
    x = torch.zeros(3, 1, 16, 4, dtype=dtype).as_strided((3, 1, 16, 4), (64, 1, 4, 1))
    for f in (lambda x: (x + 1).fill_(0.5), lambda x: (x + 1).fill_(2), lambda x: (x + 1).zero_()):
        mine, eager = vitrify.compile(f)(x), f(x)
        assert torch.equal(mine, eager) and mine.stride() == eager.stride()
    assert vitrify.counters["fallbacks"] == 0 and vitrify.counters["compiled_calls"] == 3


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("threads", [1, 2])
def test_pixel_gradients_follow_the_threads(threads, stride):
    """On one thread ATen does not give 1x1 convolutions to oneDNN, and the gradient of such a weight has other strides."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(32, 8, 1, stride), nn.GELU())
        x = torch.randn(2, 32, 8, 8).to(memory_format=torch.channels_last)
        run = lambda f: gradients(lambda x: (f(x),), module, x, [0])  # noqa: E731
        theirs, mine = run(module), run(vitrify.compile(module))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(mine, theirs):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["fallbacks"] == 0


@pytest.mark.parametrize("groups,kernel", [(1, 1), (1, 3), (2, 1)])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
def test_strides_of_gradients_of_weights(batch, groups, kernel, half):
    """oneDNN gives those of 1x1 convolutions over channels-last images in channels-last strides, of bfloat16 too; the conversion to float32 keeps them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 16, kernel, groups=groups), nn.GELU(), nn.Conv2d(16, 4, 1))
    compiled = vitrify.compile(net)
    for layout in (torch.contiguous_format, torch.channels_last):
        x, strides = torch.randn(batch, 8, 7, 6).contiguous(memory_format=layout), []
        for call in (net, compiled):
            net.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                call(x).float().square().mean().backward()
            strides.append([(p.grad.stride(), p.grad.dtype) for p in net.parameters()])
        assert strides[0] == strides[1]
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["fallbacks"] == vitrify.counters["eager_calls"] == 0
