"""A bfloat16 result was used again in its kernel as it was before it was rounded: maximum(x, v) < v could hold."""
import pytest
import torch

import vitrify


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_result_is_used_as_it_is_seen(dtype):
    def fn(x, y):
        v = x * y + x
        return v, torch.maximum(x, v) < v, v.float() - v

    torch.manual_seed(0)
    x, y = torch.randn(64, 64, dtype=dtype), torch.randn(64, 64, dtype=dtype)
    compiled, before = vitrify.compile(fn), vitrify.counters["kernels_launched"]
    v, below, difference = compiled(x, y)
    assert not below.any() and not difference.any()
    assert torch.equal(v, (x * y + x)) or (v.float() - (x * y + x).float()).abs().max() <= 2 * torch.finfo(dtype).eps * v.float().abs().max()
    assert vitrify.counters["kernels_launched"] == before + 1
