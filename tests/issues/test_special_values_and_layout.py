"""Eager's norms and gelu have formulas that follow from the memory format, and tell with values whose squares overflow. Where a pass lays images out otherwise than eager,
the formula is still eager's: a group norm behind a convolution gave NaN where eager's is finite."""
import pytest
import torch
import torch.nn.functional as F
import vitrify

WEIGHT, BIAS = torch.linspace(0.5, 1.5, 8), torch.linspace(-1, 1, 8)
NORMS = {
    "group norm": lambda x: F.group_norm(x, 2, WEIGHT, BIAS),
    "group norm, plain": lambda x: F.group_norm(x, 2),
    "batch norm": lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8), WEIGHT, BIAS, training=True),
    "batch norm, plain": lambda x: F.batch_norm(x, None, None, training=True),
    "batch norm in evaluation": lambda x: F.batch_norm(x, torch.zeros(8), torch.full((8,), 1e-38), WEIGHT, BIAS),
    "instance norm": lambda x: F.instance_norm(x, weight=WEIGHT, bias=BIAS),
    "gelu": F.gelu,
    "gelu of a sum": lambda x: F.gelu(x + 1),
}
AFTER = {"returned": lambda y: y, "silu": F.silu, "plus one": lambda y: y + 1, "pooled": lambda y: F.max_pool2d(y, 2)}


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("gelu that is returned is a post-op of the convolution", some=True)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("norm", NORMS)
def test_behind_a_convolution(norm, after, grad):
    torch.manual_seed(1)
    w = torch.randn(8, 8, 3, 3, requires_grad=grad)
    images = torch.randn(2, 8, 8, 8)

    def f(x):
        return AFTER[after](NORMS[norm](F.conv2d(x, w, padding=1)))
    compiled = vitrify.compile(f)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        for value in (1.0, 1e18, 1e20, 1e30, 1e37, 3e38, float("inf"), float("nan")):
            x = images.clone()
            x.view(-1)[7] = value
            x = x.contiguous(memory_format=memory_format)
            ours, theirs = compiled(x), f(x)
            assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isinf(), theirs.isinf()), (value, memory_format)
            assert ours.stride() == theirs.stride()


@pytest.mark.no_kernels("eager's op runs for exponents below float32's range", some=True)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
@pytest.mark.parametrize("exponent", [1e-50, -1e-50, 1e-46, 1e40, 0.3])
def test_powers_of_integers(dtype, exponent):
    x = torch.tensor([0, 1, -1, -2, 3]).to(dtype)
    torch.testing.assert_close(vitrify.compile(lambda x: x.pow(exponent) + 0)(x), x.pow(exponent) + 0, equal_nan=True)
