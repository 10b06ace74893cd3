"""Draws like a tensor without elements: of the tensor's dtype, and nothing is drawn. bernoulli() gave bool."""
import pytest
import torch
import vitrify

DRAWS = {
    "bernoulli": lambda t: t.bernoulli(0.3), "bernoulli of each": lambda t: torch.bernoulli(t.abs().clamp(max=1)), "dropout": lambda t: torch.nn.functional.dropout(t, 0.4),
    "rand_like": torch.rand_like, "randn_like": torch.randn_like, "randint_like": lambda t: torch.randint_like(t, 9), "normal_": lambda t: (t * 1).normal_(), "uniform_": lambda t: (t * 1).uniform_(),
    "exponential_": lambda t: (t * 1).exponential_(), "bernoulli_": lambda t: (t * 1).bernoulli_(0.5),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("draw", DRAWS)
def test_draws_like_nothing(draw, dtype, dynamic):
    programs = [lambda x: (DRAWS[draw]((x * 2)[:, :0]), x + 1), lambda x: (DRAWS[draw]((x * 2).t()[:0]), x + 1), lambda x: (DRAWS[draw](x[x.shape[0]:]), x * 2)]
    for f in programs:
        compiled = vitrify.compile(f, dynamic=dynamic)
        for rows in (2, 3):
            found = []
            for g in (compiled, f):
                torch.manual_seed(0)
                with torch.no_grad():
                    found.append((*g(torch.arange(4.0 * rows, dtype=dtype).view(rows, 4)), torch.get_rng_state()))
            for ours, eager in zip(*found, strict=True):
                assert ours.dtype == eager.dtype and ours.stride() == eager.stride()
                assert torch.equal(ours, eager)
