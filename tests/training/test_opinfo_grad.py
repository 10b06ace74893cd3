"""Gradients of torch's op database, of the first and the second order: a subset on every run, all of it with ./x test --all (tests/ops/run_opinfo.py --grad writes
the report)."""
import sys
from pathlib import Path

import expects
import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "ops")]
import opinfo  # noqa: E402
import opinfo_grad  # noqa: E402
from compare import Mismatch  # noqa: E402

QUICK = {
    "add", "sub", "mul", "div.no_rounding_mode", "pow", "exp", "log", "sin", "tanh", "sigmoid", "erf", "sqrt", "abs", "clamp", "where", "maximum", "nn.functional.relu", "nn.functional.gelu",
    "nn.functional.layer_norm", "nn.functional.batch_norm", "nn.functional.linear", "nn.functional.embedding", "nn.functional.cross_entropy", "softmax", "log_softmax", "sum", "mean", "amax", "var",
    "cumsum", "matmul", "addmm", "cat", "split", "view", "permute", "expand", "index_select", "gather", "scatter_add", "masked_fill",
}
VIEWS = {"expand", "permute", "split", "view"}  # of these: give only views, and sums or copies of ATen's as gradients
OPS = {}
for _op in opinfo.database():
    OPS.setdefault(opinfo.name_of(_op), _op)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(QUICK))
def test_gradient(name):
    result = opinfo_grad.run_op(OPS[name], samples=2)
    assert result.failures == []
    assert result.passed == result.samples > result.unclear == 0
    assert result.fallback == 0
    opinfo.without_kernels(result, name in VIEWS)


@pytest.mark.slow
@pytest.mark.eager("recorded ", "a value that the program reads is another", "a size that follows from content", some=True)  # first calls, which learn what ATen gives
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(n for n in OPS if OPS[n].supports_autograd))
def test_every_gradient(name):
    result = opinfo_grad.run_op(OPS[name], samples=opinfo.ALL)
    expects.eager(*opinfo.EAGER.get(name, ()), some=True)
    assert result.failures == []
    opinfo.without_kernels(result, None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(n for n in QUICK if OPS[n].supports_gradgrad))
def test_second_order(name):
    result = opinfo_grad.run_op(OPS[name], samples=1, order=2)
    assert result.failures == []
    assert result.passed == result.samples > result.unclear == 0
    assert result.fallback == 0
    opinfo.without_kernels(result, name in VIEWS)


@pytest.mark.slow
@pytest.mark.eager("recorded ", "a value that the program reads is another", "a size that follows from content", some=True)  # first calls, which learn what ATen gives
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(n for n in OPS if OPS[n].supports_gradgrad))
def test_every_second_order(name):
    result = opinfo_grad.run_op(OPS[name], samples=opinfo.ALL, order=2)
    expects.eager(*opinfo.EAGER.get(name, ()), some=True)
    assert result.failures == []
    opinfo.without_kernels(result, None)


def sine_with(gradient):
    """In place of vitrify.compile: a sine whose derivative is `gradient` of the tangent and the argument."""
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return gradient(g, *ctx.saved_tensors)
    return lambda fn: lambda x, *_: Wrong.apply(x)


@pytest.mark.no_kernels("nothing is compiled")
def test_a_wrong_second_gradient_is_found(monkeypatch):
    """The first order is right."""
    monkeypatch.setattr("vitrify.compile", sine_with(lambda g, x: g * (x.detach().cos() - (1 + 1e-6) * x.detach().sin() * (x - x.detach()))))
    sample = (torch.randn(64, dtype=torch.float64, requires_grad=True), (), {})
    from compare import conditioned_run
    opinfo_grad.compare(lambda x, a, k: x.sin(), sample, True, conditioned_run, False)
    with pytest.raises(Mismatch, match="gradient of gradients"):
        opinfo_grad.compare(lambda x, a, k: x.sin(), sample, True, conditioned_run, False, order=2)


@pytest.mark.no_kernels("nothing is compiled")
def test_a_wrong_gradient_is_found(monkeypatch):
    monkeypatch.setattr("vitrify.compile", sine_with(lambda g, x: g * x.cos() * (1 + 3e-6)))
    sample = (torch.randn(64, requires_grad=True), (), {})
    from compare import fp64_run
    with pytest.raises(Mismatch, match="gradient"):
        opinfo_grad.compare(lambda x, a, k: x.sin(), sample, True, fp64_run, True)
