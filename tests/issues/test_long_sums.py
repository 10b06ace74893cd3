"""oneDNN's channels-last kernels add the products of a pixel one by one: with 18432 of them (fcn_resnet50's head) the error was twice eager's."""
import torch
import vitrify
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
