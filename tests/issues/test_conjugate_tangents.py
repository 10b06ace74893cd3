"""The gradient of a conjugate view that a program returns, for a tangent with gaps, differentiated again: parts of what lies in memory were taken as if they were conjugate."""
import pytest
import torch
import vitrify

PROGRAMS = {"conj": lambda x, w: torch.complex(x, w).conj(), "of a product": lambda x, w: (torch.complex(x, w) * 2).conj(), "real": lambda x, w: torch.complex(x, w).conj().real, "imag": lambda x, w: torch.complex(x, w).conj().imag, "product": lambda x, w: torch.complex(x, w).conj() * torch.complex(w, x),
            "view": lambda x, w: torch.view_as_complex(torch.stack([x, w], -1)).conj(), "polar": lambda x, w: torch.polar(x, w).conj(), "made complex": lambda x, w: (x + 0j).conj(), "cast": lambda x, w: x.to(torch.complex64).conj(), "negative": lambda x, w: torch._neg_view(x * w)}
TANGENTS = {"plain": torch.ones_like, "gaps": lambda y: torch.stack([torch.ones_like(y), torch.ones_like(y)], -1)[..., 0].detach(), "rows": lambda y: torch.ones((y.shape[0] * 2,) + y.shape[1:], dtype=y.dtype)[::2], "expanded": lambda y: torch.ones((), dtype=y.dtype).expand(y.shape),
            "turned": lambda y: torch.ones(y.shape[::-1], dtype=y.dtype).permute(*range(y.dim())[::-1]), "conjugate": lambda y: torch.ones_like(y.resolve_conj().resolve_neg()).conj()}


@pytest.mark.compiled("ATen computes all of some")
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("tangent", TANGENTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_second_order(name, tangent, needs_grad):
    def told(f):
        x, w = torch.linspace(0.5, 1.5, 6).view(2, 3).requires_grad_(), torch.linspace(1.0, 2.0, 6).view(2, 3).requires_grad_()
        y = f(x, w)
        t = TANGENTS[tangent](y.detach()).requires_grad_(needs_grad)
        first = torch.autograd.grad(y, [x, w], t, create_graph=True, allow_unused=True)
        total = sum((g * g * x).sum() for g in first if g is not None)
        return [None if g is None else g.resolve_conj().resolve_neg() for g in (*first, *torch.autograd.grad(total, [x, w, t] if needs_grad else [x, w], allow_unused=True))]
    for ours, eager in zip(told(vitrify.compile(PROGRAMS[name], fullgraph=True)), told(PROGRAMS[name]), strict=True):
        torch.testing.assert_close(ours, eager)
