"""count_nonzero made integers of its operand before it looked: what lies between -1 and 1 counted as zero."""

import pytest
import torch

import vitrify

VALUES = [0.5, -0.25, 0.0, -0.0, 1e-30, 3.0, float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("dim", [None, 0, (0, 1), -1])
def test_fractions_are_not_zero(dtype, dim):
    x = torch.tensor(VALUES).nan_to_num(0, 7, -7).to(dtype) if dtype == torch.int64 else torch.tensor(VALUES).to(dtype)
    x = x.repeat(4, 1)
    compiled, before = vitrify.compile(lambda x: torch.count_nonzero(x, dim)), vitrify.counters["kernels_launched"]
    ours, eager = compiled(x), torch.count_nonzero(x, dim)
    assert torch.equal(ours, eager) and ours.dtype == eager.dtype
    assert vitrify.counters["kernels_launched"] > before
