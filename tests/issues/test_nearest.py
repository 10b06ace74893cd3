"""Nearest resampling by a scale factor that is not the sizes' own: ATen goes by the factor or by the sizes, as dtype, layout and size of the image say."""
import expects
import pytest
import torch
import vitrify
from torch.nn.functional import interpolate

LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": "last"}
FACTORS = [1.0, 1.01, 1.1, 1.5, 2.0, 2.1, 2.7, 3.0, 3.1, 0.5, 0.7]
SHAPES = [(1, 1, 5), (2, 4, 33), (1, 2, 5, 7), (1, 4, 5, 7), (1, 2, 33, 40), (1, 4, 33, 40), (1, 4, 61, 67), (1, 2, 5, 5, 6), (1, 5, 5, 5, 6)]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_factors(shape, layout, dtype):
    x = (torch.arange(torch.Size(shape).numel()) % 251).view(shape).to(dtype)
    if layout == "channels last":
        if len(shape) < 4:
            return expects.no_kernels("has no such layout")
        x = x.contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    expects.compiled("some are calls of ATen")
    for factor in FACTORS:
        f = lambda x: interpolate(x, scale_factor=factor)  # noqa: B023
        ours, eager = vitrify.compile(f, fullgraph=True)(x), f(x)
        assert torch.equal(ours, eager), factor
        assert ours.stride() == eager.stride()


@pytest.mark.parametrize("factor", [2.0, 1.01, 2.1])
@pytest.mark.parametrize("dynamic", [False, True])
def test_beside_convolutions(factor, dynamic):
    """Which put an image into channels-last memory that eager leaves as it is."""
    torch.manual_seed(0)
    a, b = torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.Conv2d(16, 8, 3, padding=1)
    f = lambda x: b(interpolate(a(x).relu(), scale_factor=factor)).relu()
    with torch.no_grad():
        compiled = vitrify.compile(f, fullgraph=True, dynamic=dynamic)
        for size in (64, 70, 66) if dynamic else (64,):
            x = torch.randn(2, 3, size, size + 2)
            torch.testing.assert_close(compiled(x), f(x))


@pytest.mark.parametrize("sizes", [(5, 7), (40, 100)], ids=str)
@pytest.mark.parametrize("factors", [(None, None), (1.0, 1.0), (3.0, 3.0), (1.1, 2.1)], ids=str)
def test_sizes_of_its_own(factors, sizes):
    """What only a call of the op itself says: sizes that are not the factor's."""
    x = torch.arange(float(4 * sizes[0] * sizes[1])).view(1, 4, *sizes)
    for to in (sizes, [2 * s for s in sizes], [3 * s for s in sizes], [s + 1 for s in sizes]):
        f = lambda x: torch.ops.aten.upsample_nearest2d(x, list(to), *factors) + 1  # noqa: B023
        assert torch.equal(vitrify.compile(f, fullgraph=True)(x), f(x)), to
