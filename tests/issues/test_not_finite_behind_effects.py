"""A convolution that adds and takes maxima in one library call loses NaNs: the ops run in its place then. Where it had written over what it adds, and an
effect of the same call had been seen, the call's own result stayed. Without an effect the program runs eagerly once more, where what it adds is a library's result that is written over."""
import bounds
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch import nn


@torch.library.custom_op("behind_effects::seen", mutates_args=())
def seen(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@seen.register_fake
def _(x):
    return torch.empty_like(x)


NOTHING = lambda x, b: b.sum()  # noqa: E731
EFFECTS = {"none": NOTHING, "custom op": lambda x, b: seen(b).sum(), "write": lambda x, b: b.add_(1).sum(), "draw": lambda x, b: torch.rand(2).sum(), "copy": lambda x, b: b.copy_(x[0, :, 0, 0]).sum()}
MADE = {"custom op": seen, "native": lambda x: x * 2, "sort": lambda x: x.sort(1)[0], "convolution": lambda x: F.conv2d(x, torch.eye(16)[:, :, None, None])}


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("nothing but library calls", some=True)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("made", [pytest.param(m, marks=pytest.mark.eager("a number is not finite", some=True)) if m == "sort" else m for m in MADE])
def test_convolution_that_adds(made, effect, kernel, value):
    torch.manual_seed(0)
    first, second = nn.Conv2d(16, 16, 1).requires_grad_(False), nn.Conv2d(16, 16, kernel, padding=kernel // 2).requires_grad_(False)

    def program(x, b):
        before = EFFECTS[effect](x, b)
        y = MADE[made](x)
        return (second(first(y).relu()) + y).relu(), before

    compiled = vitrify.compile(program)
    plain = torch.randn(2, 16, 8, 8)
    odd = plain.clone()
    odd[1, 0, 2, 3] = value
    for x in (odd, plain, odd):
        ours, theirs = torch.zeros(16), torch.zeros(16)
        with torch.no_grad():
            torch.manual_seed(1)
            want = program(x, theirs)
            torch.manual_seed(1)
            got = compiled(x, ours)
        for a, b in zip(got, want):
            small = ~(b.abs() > 1e30)  # sums of numbers near the largest cancel to what has other roundings
            assert torch.equal(a.isfinite(), b.isfinite())
            torch.testing.assert_close(a[small], b[small], equal_nan=True, **bounds.DEEP_CONVOLUTIONS)
        assert torch.equal(ours, theirs)
