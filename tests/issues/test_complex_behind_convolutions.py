"""ATen's complex arithmetic, and what a rule declines, behind a convolution that a pass lays out as channels-last: whole programs ran eagerly in every call."""
import bounds
import pytest
import torch
import torch.nn.functional as F
import vitrify

PROGRAMS = {
    "times": lambda y, z, x: y * 2j, "times a tensor": lambda y, z, x: z * y, "plus": lambda y, z, x: y + z, "over": lambda y, z, x: y / z, "cast": lambda y, z, x: y.to(torch.complex64) * 2,
    "power": lambda y, z, x: y ** 2j, "relu before": lambda y, z, x: F.relu(y) * 1j, "pooled": lambda y, z, x: F.max_pool2d(y, 2) * 1j, "phase": lambda y, z, x: torch.exp(1j * y).real,
    "polar": lambda y, z, x: torch.polar(y.abs(), y).real, "equal": lambda y, z, x: (y == z).float(), "written": lambda y, z, x: z.clone().add_(y).real,
    "addcmul": lambda y, z, x: torch.addcmul(z, y, z).real, "beside doubles": lambda y, z, x: (y * 1j + x.double()).real, "joined": lambda y, z, x: torch.cat([y.to(torch.complex64), z], 1).real,
    "summed": lambda y, z, x: (y * 1j).sum((2, 3)).imag, "doubles": lambda y, z, x: y.double() + z.to(torch.complex128), "a bound that is no number": lambda y, z, x: y.clamp(float("nan"), 1.0),
    "bound, then more": lambda y, z, x: y.clamp(min=float("nan")).nan_to_num() + 1, "normed": lambda y, z, x: F.group_norm(y, 2) * 1j,
}


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("ATen computes complex numbers", some=True)
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_behind_a_convolution(name, dynamic, grad):
    torch.manual_seed(0)
    w, z, x = torch.randn(8, 8, 3, 3, requires_grad=grad), torch.randn(2, 8, 12, 12, dtype=torch.complex64), torch.randn(2, 8, 12, 12)

    def f(x):
        return PROGRAMS[name](F.conv2d(x, w, padding=1), z, x)
    compiled = vitrify.compile(f, dynamic=dynamic)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        given = x.contiguous(memory_format=memory_format)
        for _ in range(2):
            ours, theirs = compiled(given), f(given)
            torch.testing.assert_close(ours, theirs, **bounds.DEEP, equal_nan=True)
            assert ours.stride() == theirs.stride()
