"""A real view of a complex temporary that is written and returned beside a write to an argument: it was made again in the strides of its own dtype."""
import pytest
import torch

import vitrify

VIEWS = {
    "real": lambda y: torch.complex(y, y).real,
    "imag": lambda y: torch.complex(y, y).imag,
    "of a transform": lambda y: torch.fft.fft(y).real,
    "view_as_real": lambda y: torch.view_as_real(torch.complex(y, y))[..., 1],
    "rows of it": lambda y: torch.complex(y, y).real[1:],
    "strided": lambda y: (y * 2)[:, ::2],
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("written", [True, False], ids=["written", "read"])
@pytest.mark.parametrize("name", VIEWS)
def test_as_eager(name, written, grad):
    def f(y, w):
        t = VIEWS[name](y)
        w.add_(1)
        if written:
            t.mul_(3)
        return t

    def outcome(f):
        y = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3).requires_grad_(grad)
        w = torch.ones(3)
        t = f(y, w)
        results = [t.detach().clone(), w]
        if t.requires_grad:
            results += torch.autograd.grad(t.sum(), y)
        return results, t.stride(), t.storage_offset(), w._version

    compiled = vitrify.compile(f)
    for _ in range(2):
        (ours, *others), (eager, *expected) = outcome(compiled), outcome(f)
        assert others == expected
        torch.testing.assert_close(ours, eager)
