"""3x3 convolutions with frozen weights by fewer products: as exact as eager's, in one plan for all batches, again when weights change."""
import bounds
import pytest
import torch
import vitrify
from beside import calls_of
from torch import nn
from vitrify import measure

pytestmark = [pytest.mark.filterwarnings("error::vitrify.VitrifyWarning"),
              pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this processor has no AVX-512: other convolutions run")]


class Block(nn.Module):
    def __init__(self, channels, out):
        super().__init__()
        self.a = nn.Conv2d(channels, out, 3, padding=1)
        self.norm = nn.BatchNorm2d(out)
        self.b = nn.Conv2d(out, out, 3, padding=1, bias=False)

    def forward(self, x):
        h = torch.relu(self.norm(self.a(x)))
        return torch.relu(self.b(h) + h), h.mean((2, 3))


def run(net, compiled, x):
    with torch.no_grad():
        ours, eager, right = compiled(x), net(x), measure.double_run(net, (x,), {})
    for a, b in zip(measure.tensors(ours), measure.tensors(eager)):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    assert measure.within(measure.error(ours, right), measure.error(eager, right))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("channels,out,size", [(16, 16, (2, 9, 9)), (64, 80, (1, 14, 13)), (128, 256, (2, 7, 10)), (512, 512, (4, 7, 7))], ids=str)
def test_as_exact_as_eager(channels, out, size, threads):
    torch.manual_seed(0)
    net = Block(channels, out).eval()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for layout in (torch.contiguous_format, torch.channels_last):
            compiled = vitrify.compile(net)
            x = torch.randn(size[0], channels, *size[1:]).contiguous(memory_format=layout)
            run(net, compiled, x)
            run(net, compiled, x)
    finally:
        torch.set_num_threads(before)
    assert "vitrify::winograd_convolution" in calls_of(compiled)
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["fallbacks"] == vitrify.counters["eager_calls"] == 0


def test_the_option():
    """Both ways give results; they are not the same to the last bit, which shows that the option chooses."""
    torch.manual_seed(0)
    net, x = Block(64, 64).eval(), torch.randn(2, 64, 14, 14)
    with torch.no_grad():
        fewer, direct = vitrify.compile(net)(x)[0], vitrify.compile(net, options={"winograd": False})(x)[0]
    assert not torch.equal(fewer, direct)
    torch.testing.assert_close(fewer, direct, **bounds.WINOGRAD)


def test_changed_weights():
    torch.manual_seed(0)
    net, x = Block(32, 32).eval(), torch.randn(2, 32, 12, 12)
    compiled = vitrify.compile(net)
    run(net, compiled, x)
    with torch.no_grad():
        net.b.weight.mul_(-2)
        net.norm.running_mean.add_(1)
    run(net, compiled, x)
    assert vitrify.counters["captures"] == 1 and "vitrify::winograd_convolution" in calls_of(compiled)


def test_batches_that_change():
    torch.manual_seed(0)
    net = Block(32, 48).eval()
    compiled = vitrify.compile(net)
    for batch in (2, 5, 3):
        x = torch.randn(batch, 32, 12, 11)
        vitrify.mark_dynamic(x, 0)
        run(net, compiled, x)
    assert vitrify.counters["captures"] == 1 and "vitrify::winograd_convolution" in calls_of(compiled)


def test_sizes_that_change():
    """Images of any size have the plain convolution, in one plan."""
    torch.manual_seed(0)
    net = Block(32, 48).eval()
    compiled = vitrify.compile(net, dynamic=True)
    for size in ((2, 12, 12), (4, 5, 8), (3, 31, 17)):
        run(net, compiled, torch.randn(size[0], 32, *size[1:]))
    assert vitrify.counters["captures"] == 1
