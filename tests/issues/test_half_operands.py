"""Remainders of half tensors by a number or a float32 scalar were taken by the unrounded divisor; eager rounds it to the common type first. A quotient by
such a scalar is truncated unrounded."""
import pytest
import torch
import vitrify
from vitrify import measure

OPS = {"remainder": torch.remainder, "fmod": torch.fmod, "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
       "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"), "of a scalar": lambda x, y: torch.remainder(y, x)}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("divisor", [0.3, torch.tensor(0.3), torch.rand(64, generator=torch.Generator().manual_seed(3)).bfloat16() + 0.1], ids=["number", "scalar", "tensor"])
def test_divisors_are_rounded_as_eager_rounds_them(name, divisor):
    torch.manual_seed(0)
    x = (torch.randn(64, 64) * 3).bfloat16()
    compiled = vitrify.compile(OPS[name])
    compiled(x, divisor)
    did = measure.counted(lambda: compiled(x, divisor))
    assert did["kernels_launched"] > 0
    exact = name == "floor" and isinstance(divisor, torch.Tensor) and divisor.dim()  # eager rounds inside: 8.5 / 0.1045 is 81.3, and 80 there
    assert torch.equal(compiled(x, divisor), OPS[name](x.double(), divisor.double()).bfloat16() if exact else OPS[name](x, divisor))
