"""Modules made in inference mode: their parameters count no versions, also when they are given data that was made outside of it."""
import pytest
import torch
import vitrify
from torch import nn

MODULES = {
    "linear": lambda: nn.Linear(4, 4), "convolution": lambda: nn.Conv2d(4, 8, 3), "batch norm": lambda: nn.BatchNorm2d(4).eval(),
    "convolution and norm": lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval(), "lstm": lambda: nn.LSTM(4, 4),
}
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


def attempt(f, x):
    try:
        return f(x), None
    except RuntimeError as e:
        return None, str(e)


@pytest.mark.eager("Inference tensors", some=True)
@pytest.mark.no_kernels("torch itself refuses", some=True)
@pytest.mark.compiled("ATen computes it")
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_made_in_inference_mode(make, mode):
    with torch.inference_mode():
        module = make()
    x = torch.randn(2, 3, 4) if isinstance(module, nn.LSTM) else torch.randn(2, 4, 8, 4)
    compiled = vitrify.compile(module)
    for _ in range(2):
        for _ in range(2):
            with mode():
                (eager, refused), (ours, error) = attempt(module, x), attempt(compiled, x)
            if refused is None:
                assert error is None, error
                torch.testing.assert_close(ours, eager)
            assert all(p.requires_grad for p in module.parameters())
        for p in module.parameters():
            p.data = torch.randn(p.shape)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_versions_of_running_statistics(mode):
    """In inference mode composites arrive below where versions are counted."""
    net, x = nn.InstanceNorm1d(5, track_running_stats=True), torch.randn(2, 5, 8)
    compiled, moved = vitrify.compile(net), []
    for f in (net, compiled, compiled):
        before = net.running_mean._version, net.running_var._version
        with mode():
            f(x)
        moved.append((net.running_mean._version - before[0], net.running_var._version - before[1]))
    assert moved[0] == moved[1] == moved[2] and moved[0][0] > 0


def test_views_within_composites():
    """Views that composites make below where versions are counted are made there."""
    net, x = nn.MultiheadAttention(16, 1, batch_first=True), torch.randn(1, 16)

    def f(x):
        return net(x, x, x, need_weights=False)[0] + 1
    with torch.inference_mode():
        torch.testing.assert_close(vitrify.compile(f)(x), f(x))


FNS = {"clone": lambda x: x.clone(), "sum": lambda x: x + 1, "sine": lambda x: x.sin(), "view": lambda x: x.view(2, 3) * 1, "copied": lambda x: torch.empty(6).copy_(x),
       "double": lambda x: x.double()}


@pytest.mark.eager("on a tensor that needs gradients", some=True)
@pytest.mark.compiled("ATen computes it")
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
@pytest.mark.parametrize("fn", FNS)
def test_one_that_needs_gradients(fn):
    """Autograd does not see an op that takes nothing else, but sees what its kernel calls, as copy_() of clone()."""
    results = []
    for f in (vitrify.compile(FNS[fn]), FNS[fn]):
        with torch.inference_mode():
            x = torch.ones(6).requires_grad_()
        y = f(x)
        results.append([y.requires_grad, y.detach(), torch.autograd.grad(y.sum(), x) if y.requires_grad else None])
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1:], results[1][1:])
