"""Where eager's kernel writes a * b + c in one expression, its compiler rounds once: what overflows as a product does not as a sum. Ours left that to LLVM, which
could not see it when the product was of scalars (moved out of the loop), and never fused a difference."""
import pytest
import torch
import vitrify
from vitrify import measure

OPS = {"addcmul": lambda x, y, s: torch.addcmul(x, y, y), "addcmul of scalars": lambda x, y, s: torch.addcmul(x, s, s), "its value": lambda x, y, s: torch.addcmul(x, y, s, value=0.9),
       "add": lambda x, y, s: torch.add(x, y, alpha=10), "sub": lambda x, y, s: torch.sub(x, y, alpha=-10),
       "lerp": lambda x, y, s: torch.lerp(x, y, 0.25), "lerp from the end": lambda x, y, s: torch.lerp(x, y, 0.75)}


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="eager's kernels for such a machine have no fused multiply-add")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_as_eager_to_the_last_bit(name, dtype):
    torch.manual_seed(0)
    x, y, s = torch.randn(67, dtype=dtype), torch.randn(67, dtype=dtype), torch.randn(1, dtype=dtype)
    huge = torch.finfo(dtype).max / 2
    compiled = vitrify.compile(OPS[name])
    for given in ((x, y, s), (torch.full_like(x, -torch.inf), torch.full_like(y, huge), torch.full_like(s, huge))):
        compiled(*given)
        did = measure.counted(lambda: compiled(*given))
        assert did["kernels_launched"] > 0
        torch.testing.assert_close(compiled(*given), OPS[name](*given), rtol=0, atol=0, equal_nan=True)


INTEGERS = {"sub": lambda x, y: torch.sub(x, y, alpha=3), "add": lambda x, y: torch.add(x, y, alpha=7), "rsub": lambda x, y: torch.rsub(x, y, alpha=2),
            "addcmul": lambda x, y: torch.addcmul(x, y, y, value=2)}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name, dtype):
    """Theirs have nothing to round, and wrap around."""
    torch.manual_seed(0)
    x, y = torch.randint(0, 200, (67,), dtype=dtype), torch.randint(0, 200, (67,), dtype=dtype)
    compiled = vitrify.compile(INTEGERS[name])
    compiled(x, y)
    did = measure.counted(lambda: compiled(x, y))
    assert did["kernels_launched"] > 0
    assert torch.equal(compiled(x, y), INTEGERS[name](x, y))
