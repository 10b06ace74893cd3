"""Comparisons of halves within a sum, beside a function that is called: what is compared waits on the stack. LLVM 19 reads it from there as the other operand of a
masked comparison on processors with AVX-512 FP16, and compared the wrong way round."""
import pytest
import torch
from beside import check

COMPARE = {"gt": lambda x: x > -2, "ge": lambda x: x >= -0.5, "lt": lambda x: x < 0.5, "le": lambda x: x <= 2, "eq": lambda x: x == 0.5, "ne": lambda x: x != 0.5, "of two": lambda x: x > x.flip(0) - 1}
REDUCE = {"all": lambda m: m.all(-2), "any": lambda m: m.any(-2), "sum": lambda m: m.sum(-2), "rows": lambda m: m.all(-1)}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("reduce", REDUCE)
@pytest.mark.parametrize("compare", COMPARE)
def test_as_eager(compare, reduce, dtype):
    def f(x, y):
        v = torch.fmod(x, y.abs() + 1)
        return REDUCE[reduce](COMPARE[compare](x)), torch.count_nonzero(v, 0), v

    def given():
        torch.manual_seed(3)
        x, y = torch.randn(3, 33), torch.randn(3, 33, dtype=torch.bfloat16)
        x[:, 5], x[1, 7] = 0.5, float("nan")
        return x.to(dtype), y
    check(f, given, launches=True)
