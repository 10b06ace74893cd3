"""Rules of results know a type that is none of the engine's as such, not which: gradients in eight-bit floats and complex halves were taken for bytes, and raised or
made the program run eagerly."""
from __future__ import annotations

import warnings

import pytest
import torch
import vitrify

E5 = torch.float8_e5m2


def complex_half(x):
    return torch.complex(x, x * 2).to(torch.complex32)


def parts(z):
    return torch.view_as_real(z.to(torch.complex64))


PROGRAMS = {
    "slice": lambda x: (x * 2).to(E5)[1:].float(), "diagonal": lambda x: (x * 2).to(E5).diagonal().float(), "indexed": lambda x: (x * 2).to(E5)[torch.tensor([1, 0])].float(),
    "complex slice": lambda x: parts(complex_half(x)[1:]), "complex diagonal": lambda x: parts(complex_half(x).diagonal()), "complex cat": lambda x: parts(torch.cat([complex_half(x)] * 2)),
    "complex stack": lambda x: parts(torch.stack([complex_half(x)] * 2)), "complex index_select": lambda x: parts(complex_half(x).index_select(0, torch.tensor([1, 0]))),
    "complex as_strided": lambda x: parts(complex_half(x).as_strided((3,), (2,))),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients(program, create_graph):
    def f(x):
        return PROGRAMS[program](x).sin()

    x, seen = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for g in (f, vitrify.compile(f)):
            first, = torch.autograd.grad(g(x).cos().sum(), x, create_graph=create_graph)
            seen.append(first.detach())
            if create_graph:
                second, = torch.autograd.grad(first.square().sum(), x)
                assert second.dtype is x.dtype and second.isfinite().all() and second.any()
    assert torch.equal(*seen)
