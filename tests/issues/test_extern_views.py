"""Views that ATen makes inside of a backward. What a window on a saved tensor showed was freed once the view was made, and the memory was another's by
the time a kernel read it (the gradient of stft's window). A view of no elements was copied by a nest that there is none of: memory was overwritten
(the gradients of complex and polar of no elements). What _fft_r2c gives along a dim of one element has the kernel's strides, not its Meta kernel's."""
import bounds
import pytest
import torch
import vitrify
from vitrify import measure


def step(f, inputs):
    out = f(*inputs)
    return out, torch.autograd.grad(out, inputs, torch.ones_like(out))


def check(f, *inputs):
    compiled = vitrify.compile(f)
    inputs = [t.requires_grad_() for t in inputs]
    for _ in range(3):
        out, grads = step(f, inputs)
        mine = []
        did = measure.counted(lambda: mine.append(step(compiled, inputs)))  # noqa: B023
        assert did["compiled_calls"] == 2 and did["eager_calls"] == did["fallbacks"] == 0
        ours, our_grads = mine[0]
        torch.testing.assert_close(ours, out)
        torch.testing.assert_close(our_grads, grads, **bounds.DEEP_CONVOLUTIONS)
        assert [g.stride() for g in our_grads] == [g.stride() for g in grads]
    return did


@pytest.mark.parametrize("rows", [2, 300])
def test_a_saved_tensor_outlives_views_of_it(rows):
    torch.manual_seed(0)
    did = check(lambda x, w: torch.stft(x, n_fft=16, window=w, return_complex=True), torch.randn(rows, 100), torch.rand(16))
    assert did["kernels_launched"] > 1


@pytest.mark.compiled("there is nothing to compute")
@pytest.mark.parametrize("op", [torch.complex, torch.polar])
def test_views_of_no_elements(op):
    check(op, torch.zeros(0, 1, 3), torch.zeros(0, 10, 3))


@pytest.mark.parametrize("f", [torch.fft.irfft2, torch.fft.irfftn, torch.fft.rfft2, lambda x: torch.fft.rfft(x, dim=0)])
@pytest.mark.parametrize("shape", [(1, 2), (3, 1, 4), (1, 3, 4)])
def test_fourier_transforms_of_one_element(f, shape):
    torch.manual_seed(0)
    check(f, torch.randn(shape))
