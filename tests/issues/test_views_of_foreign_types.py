"""Views in types that the engine does not compute in (complex halves, unsigned words, eight-bit floats) of memory that the program makes: under inference_mode
they were returned as views of memory that the next call wrote to, and as tensors that are none of inference mode's."""
from __future__ import annotations

import warnings

import pytest
import torch
import vitrify

MADE = {"permuted": lambda x: x.reshape(-1, 2), "computed": lambda x: (x * 2 + 1).contiguous(), "cloned": lambda x: x.clone(memory_format=torch.contiguous_format)}
VIEWS = {
    "complex half": torch.view_as_complex, "conjugate": lambda h: torch.view_as_complex(h).conj(), "part": lambda h: torch.view_as_complex(h)[1:],
    "transposed": lambda h: torch.view_as_complex(h).unsqueeze(-1).mT, "expanded": lambda h: torch.view_as_complex(h).flatten()[:1].expand(5),
    "back": lambda h: torch.view_as_real(torch.view_as_complex(h)), "words": lambda h: h.view(torch.uint16), "wide words": lambda h: h.view(torch.uint32),
    "eight bits": lambda h: h.view(torch.float8_e5m2), "part of words": lambda h: h.view(torch.uint16)[..., 1:],
}


def bits(t):
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    return t.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad], ids=["inference", "no_grad"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("made", MADE)
def test_results_keep_their_values(made, view, mode):
    def f(x):
        h = MADE[made](x)
        return VIEWS[view](h), x.sin() + 1

    compiled, pairs = vitrify.compile(f), []
    with warnings.catch_warnings(), mode():
        warnings.simplefilter("ignore")
        for _ in range(4):
            x = torch.randn(7, 7, 2).half().transpose(0, 1)
            given, eager = compiled(x), f(x)
            for a, b in zip(given, eager):
                assert (a.shape, a.stride(), a.dtype, a.is_inference(), a.is_conj()) == (b.shape, b.stride(), b.dtype, b.is_inference(), b.is_conj())
            pairs.append((bits(given[0]).clone(), given[0], eager[0]))
        junk = [torch.full((7, 7, 2), 3.0) for _ in range(50)]
    assert junk
    for then, given, eager in pairs:
        assert torch.equal(then, bits(eager))
        assert torch.equal(bits(given), bits(eager))
