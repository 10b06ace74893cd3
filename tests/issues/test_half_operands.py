"""Remainders of half tensors by a number or a float32 scalar were taken by the unrounded divisor; eager rounds it to the common type first. A quotient by
such a scalar is truncated unrounded. A half value that a wider result is made of was not rounded: beside the value itself, it was another."""
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


WIDER = {"float": lambda h, f: h.float(), "double": lambda h, f: h.double(), "other half": lambda h, f: h.half(), "add": lambda h, f: h + f,
         "where": lambda h, f: torch.where(f > 0, h, f), "clamp": lambda h, f: torch.clamp(f, max=h), "lerp": lambda h, f: torch.addcmul(f, h, f),
         "copy": lambda h, f: torch.empty_like(f).copy_(h), "itself": lambda h, f: h.float() == h}


@pytest.mark.parametrize("name", WIDER)
def test_wider_results_see_rounded_values(name):
    torch.manual_seed(0)
    x, y, f = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.randn(3, 64)

    def fn(x, y, f):
        h = x * y
        return h, WIDER[name](h, f)
    compiled = vitrify.compile(fn)
    compiled(x, y, f)
    did = measure.counted(lambda: compiled(x, y, f))
    assert did["kernels_launched"] > 0 and not did.get("fallbacks")
    for ours, eager in zip(compiled(x, y, f), fn(x, y, f)):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_what_is_joined_with_wider_parts_is_rounded(join, dtype):
    torch.manual_seed(0)
    x, y = torch.randn(129, 6).to(dtype), torch.randn(129, 6).to(dtype)

    def fn(x, y):
        return join([x * y, y.float()]).mul(1000).long()
    assert torch.equal(vitrify.compile(fn)(x, y), fn(x, y))
