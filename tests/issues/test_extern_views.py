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


@pytest.mark.no_kernels("libraries transform, and gradients are views of what they make", some=True)
@pytest.mark.parametrize("f", [torch.fft.irfft2, torch.fft.irfftn, torch.fft.rfft2, lambda x: torch.fft.rfft(x, dim=0)])
@pytest.mark.parametrize("shape", [(1, 2), (3, 1, 4), (1, 3, 4)])
def test_fourier_transforms_of_one_element(f, shape):
    torch.manual_seed(0)
    check(f, torch.randn(shape))


MADE = {"argument": lambda x: x, "computed": lambda x: -x, "filled": lambda x: x.clone().fill_(0.5), "full": lambda x: torch.full_like(x, 2.0)}
VIEWS = {
    "expand": lambda x: x.expand(2, *x.shape), "expand inside": lambda x: x.unsqueeze(1).expand(x.shape[0], 2, *x.shape[1:]), "transpose": lambda x: x.transpose(0, -1), "slice": lambda x: x[1:],
    "every second": lambda x: x[::2], "unfold": lambda x: x.unfold(0, 2, 1), "select": lambda x: x[0], "slice of a transpose": lambda x: x.transpose(0, -1)[1:], "one row often": lambda x: x[:1].expand(3, *x.shape[1:]),
}
BITS = {
    "int32": lambda x: x.view(torch.int32) + 1, "int16": lambda x: x.view(torch.int16) + 1, "int32 itself": lambda x: x.view(torch.int32), "uint8": lambda x: x.view(torch.uint8) * 2,
    "double": lambda x: x.view(torch.float64) * 2, "both": lambda x: (x.view(torch.int32) + 1, x + 1),
}


@pytest.mark.sweep(5)
@pytest.mark.no_kernels("no row holds whole elements of the wider type", some=True)
@pytest.mark.compiled("without arithmetic there is nothing to compute")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("made", MADE)
def test_bits_of_views(made, view, bits, dynamic):
    """A view as another dtype has the strides of what it is given, which was copied together where it repeats elements."""
    for shape in ((8,), (4, 6), (2, 3, 2)):
        x = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 0.3
        program = lambda x: BITS[bits](VIEWS[view](MADE[made](x)))  # noqa: E731
        try:
            eager = program(x.clone())
        except RuntimeError:  # rows that no wider element fits
            continue
        compiled = vitrify.compile(program, dynamic=dynamic)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                ours = compiled(x.clone())
                for a, b in zip(ours if isinstance(ours, tuple) else (ours,), eager if isinstance(eager, tuple) else (eager,)):
                    assert a.stride() == b.stride() and torch.equal(a, b)


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
@pytest.mark.parametrize("f", [
    lambda x: x.clone()[:4].expand(2, 4).view(torch.int8) + 1,
    lambda x: torch.broadcast_to(x.clone().chunk(2, 0)[0], (2, 4)).view(torch.int8).repeat(1, 2) + 1,
], ids=["slice", "chunk"])
@pytest.mark.parametrize("make", [lambda: torch.randn(7), lambda: torch.randn(14)[::2], lambda: torch.complex(torch.randn(7), torch.randn(7)).conj().imag], ids=["dense", "strided", "negative"])
def test_bits_of_what_is_expanded(f, make):
    """The call gives dense memory where it was recorded to give expanded, and copying that over itself raised."""
    compiled = vitrify.compile(f, fullgraph=True)
    x = make()
    assert torch.equal(compiled(x), f(x))
