"""as_strided() of a view may reach past it. Once the memory is written, eager's history of such a result is one of all of it: its gradient went nowhere."""
import bounds
import pytest
import torch
import vitrify


def beside(x):
    y = x.atan()
    last = y.narrow(-1, y.shape[-1] - 1, 1)
    out = last.as_strided((last.shape[-1],), (1,), 0)
    last.masked_fill_(last > 0, 1)
    return out


def over_it(x):
    y = x.atan()
    last = y[:, 1:]
    out = last.as_strided((4, 3), (1, 4), 2)
    last.mul_(2)
    return out, last


def not_written(x):
    y = x.atan()
    return y.narrow(-1, y.shape[-1] - 1, 1).as_strided((1,), (1,), 0) + 0, y


def of_a_view_of_it(x):
    y = x.atan()
    rows = y[1:]
    out = rows[:, 1:].as_strided((3,), (2,), 1)
    rows.mul_(3)
    return out[1:], y


@pytest.mark.eager("returns as_strided() of a view that it has written since", some=True)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("f", [beside, over_it, not_written, of_a_view_of_it])
def test_as_strided_beside_a_view(f, dynamic):
    found = []
    for g in (vitrify.compile(f, dynamic=dynamic), f):
        x = torch.linspace(-1, 2, 28, dtype=torch.float64).view(4, 7).requires_grad_()
        out = g(x)
        out = out if isinstance(out, tuple) else (out,)
        sum((t * torch.arange(1, t.numel() + 1).view(t.shape)).sum() for t in out).backward()
        found.append((*out, x.grad))
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, **bounds.DEEP)
        assert ours.stride() == eager.stride()
