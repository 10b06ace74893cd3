"""oneDNN's channels-last kernels add the products of a pixel one by one: with 18432 of them (fcn_resnet50's head) the error was twice eager's; with 4608 and less
(vgg11_bn, convnext_tiny) it was so on a host with AVX-512."""
import pytest
import torch
import torch.nn.functional as F
import vitrify
from beside import calls_of
from torch import nn
from vitrify import measure


def test_a_convolution_with_long_sums_keeps_its_layout():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(64, 2048, 1), nn.ReLU(), nn.Conv2d(2048, 64, 3, padding=1), nn.ReLU()).eval()
    x = torch.randn(1, 64, 16, 16)
    with torch.no_grad():
        compiled = vitrify.compile(module)
        compiled(x)
        did = measure.counted(lambda: compiled(x))
        assert did["kernels_launched"] + did["externs_called"] > 0 and not did.get("fallbacks")
        reference = measure.double_run(module, (x,), {})
        assert measure.error(compiled(x), reference) < 1.3 * measure.error(module(x), reference)


class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.conv = how, nn.Conv2d(512, 64, 3, padding=1, bias=how != "no bias")

    def forward(self, x, other):
        y = self.conv(x)
        if self.how == "residual":
            return torch.relu(y + other) + 0
        return (F.gelu(y) if self.how == "gelu" else torch.relu(y)) + other


@pytest.mark.parametrize("how", ["relu", "residual", "no bias", "gelu"])
def test_long_sums_have_two_chains(how):
    torch.manual_seed(0)
    net, x, other = Net(how).eval(), torch.randn(2, 512, 9, 11), torch.randn(2, 64, 9, 11)
    with torch.no_grad():
        right = net.double()(x.double(), other.double())
        net.float()
        eager, compiled = net(x, other), vitrify.compile(net, options={"winograd": False})
        before = vitrify.counters["kernels_launched"]
        for _ in range(2):
            ours = compiled(x, other)
        assert vitrify.counters["kernels_launched"] > before and calls_of(compiled) & {"vitrify::convolution_in_chains", "mkldnn::_convolution_pointwise"}
        assert ("vitrify::convolution_in_chains" in calls_of(compiled)) == (how != "gelu")  # which oneDNN does not add to
        assert ours.stride() == eager.stride()
        if how != "gelu":
            net.to(memory_format=torch.channels_last)
            one_chain = net(x.to(memory_format=torch.channels_last), other)
            error = [(r - right).square().mean().sqrt().item() for r in (ours, one_chain, eager)]
            assert error[0] <= max(0.85 * error[1], error[2]), error


def test_patches_are_as_exact_as_eager_s():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 384, 4, 4), nn.ReLU(), nn.Conv2d(384, 256, 2, 2), nn.ReLU()).eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        compiled = vitrify.compile(net)
        ours, eager, right = compiled(x), net(x), measure.double_run(net, (x,), {})
    assert vitrify.counters["kernels_launched"] > 0 and "aten::convolution" in calls_of(compiled)
    assert measure.within(measure.error(ours, right), measure.error(eager, right))


@pytest.mark.parametrize("far", [0., 300., 1e4, 1e5])
@pytest.mark.parametrize("shape", [(8, 3, 80, 80), (1, 2, 181, 199)], ids=str)
def test_variance_far_from_zero(shape, far):
    """What adds to a large mean less than its last bit moves the variance all the same."""
    torch.manual_seed(0)
    x = torch.randn(shape) + far
    statistics = lambda x, mean, var: F.batch_norm(x, mean, var, training=True, momentum=1.)
    compiled, before = vitrify.compile(statistics, fullgraph=True), vitrify.counters["kernels_launched"]
    mean, var = torch.zeros(shape[1]), torch.ones(shape[1])
    with torch.no_grad():
        compiled(x, mean, var)
    exact = x.double().transpose(0, 1).flatten(1)
    ulp = torch.finfo(torch.float32).eps
    assert ((var - exact.var(1)) / exact.var(1)).abs().max() < 4 * ulp * max(1, far / 1e4)
    assert (mean - exact.mean(1)).abs().max() < 2 * ulp * max(1, far)
    assert vitrify.counters["kernels_launched"] > before
