"""Linear interpolation to a size that a dim has: eager takes its elements as they are, whatever scale was given."""
import pytest
import torch
import torch.nn.functional as F
import vitrify

MODES = {"linear": 1, "bilinear": 2, "trilinear": 3}


def image(rank, infinite=False):
    x = torch.randn(2, 3, *(4, 5, 6)[:rank], generator=torch.Generator().manual_seed(1))
    if infinite:
        x.view(-1)[7] = float("inf")
    return x


def same(f, x):
    torch.testing.assert_close(vitrify.compile(f)(x), f(x), equal_nan=True)


@pytest.mark.parametrize("infinite", [False, True], ids=["finite", "infinite"])
@pytest.mark.parametrize("scale", [1.1, 1.15, 2.0, 0.5])
@pytest.mark.parametrize("mode, rank", MODES.items())
def test_scale_that_changes_no_size(mode, rank, scale, infinite):
    same(lambda x: F.interpolate(x, scale_factor=scale, mode=mode), image(rank, infinite))


@pytest.mark.parametrize("scale", [(1.1, 2.0), (2.0, 1.1), (1.1, 1.1), (0.5, 1.1)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_scale_that_changes_one_size(scale, memory_format):
    same(lambda x: F.interpolate(x, scale_factor=scale, mode="bilinear"), image(2).to(memory_format=memory_format))


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("size", [(4, 5), (4, 9), (7, 5)])
def test_infinity_stays_where_it_is(size, align):
    same(lambda x: F.interpolate(x, size=size, mode="bilinear", align_corners=align), image(2, True))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [(5, 4), (2, 3), (1, 4), (7, 9), (3, 1)])
@pytest.mark.parametrize("given", [(1, 1), (1, 3), (3, 1), (2, 2)])
def test_weights_are_zero_where_eagers_are(given, size, dtype, layout):
    """Eager's kernels round the place of a sample once, and take the element below that of a float32."""
    x = torch.randn(3, 4, *given).to(dtype)
    x[1, 2] = x[0, 0, 0, 0] = float("inf")
    x = x.to(memory_format=layout)
    for f, t in (lambda x: F.interpolate(x, size=size, mode="bilinear"), x), (lambda x: F.interpolate(x, size=size[:1], mode="linear"), x[..., 0].contiguous()):
        ours, theirs = vitrify.compile(f)(t), f(t)
        assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.isinf(), theirs.isinf())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 4, 17])
@pytest.mark.parametrize("mode, rank, last", [("bilinear", 2, torch.channels_last), ("trilinear", 3, torch.channels_last_3d)])
def test_infinities_of_channels_last(mode, rank, last, channels, dtype):
    """ATen's kernels for such memory round the place of a sample otherwise than its others do: where its weight is zero, infinity is NaN."""
    for size, to in ((1, 3), (1, 7), (2, 5), (2, 6), (3, 4), (5, 7)):
        x = torch.randn(2, channels, *(size,) * rank, generator=torch.Generator().manual_seed(1)).to(dtype)
        x.view(-1)[::3] = float("inf")
        for image in (x, x.contiguous(memory_format=last)):
            f = lambda t: F.interpolate(t, size=(to,) * rank, mode=mode)  # noqa: E731
            assert torch.equal(vitrify.compile(f)(image).isnan(), f(image).isnan())
