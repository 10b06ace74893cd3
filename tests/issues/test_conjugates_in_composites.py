"""What a composite conjugates in inference mode is resolved for the ops that it calls, as in eager: their results lie as those of what was resolved."""
import bounds
import pytest
import torch
import vitrify

PROGRAMS = {
    "hfft": torch.fft.hfft, "hfft2": lambda x: torch.fft.hfft2(x, dim=(0, 2)), "hfftn": torch.fft.hfftn, "ihfft": lambda x: torch.fft.ihfft(x.real), "vecdot": lambda x: torch.linalg.vecdot(x, x * 2),
    "adjoint": lambda x: x.mH @ x, "istft": lambda x: torch.istft(x.reshape(33, 8), 64, 16, 64, torch.ones(64)), "negative": lambda x: torch.fft.irfft(x.conj().imag + 0j), "cross": lambda x: torch.linalg.cross(x.expand(3, 1, 8).conj(), x.expand(3, 1, 8), dim=0),
}


@pytest.mark.no_kernels("library calls", some=True)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("layout", ["contiguous", "expanded", "conjugate", "turned"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_strides(name, layout, mode):
    torch.manual_seed(0)
    rows = 33 if name != "cross" else 1
    x = torch.randn(1, 1, 8, dtype=torch.complex64).expand(rows, 1, 8)
    x = {"contiguous": x.contiguous(), "expanded": x, "conjugate": x.conj(), "turned": x.contiguous().transpose(0, 2).contiguous().transpose(0, 2)}[layout]
    f = PROGRAMS[name]
    compiled = vitrify.compile(f)
    with mode():
        for _ in range(2):
            ours, theirs = compiled(x), f(x)
            torch.testing.assert_close(ours, theirs, **bounds.DEEP)
            assert ours.stride() == theirs.stride() and ours.is_conj() == theirs.is_conj()
