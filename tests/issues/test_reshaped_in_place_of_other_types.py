"""A view in another type, reshaped in place: under inference_mode the steps were made in the other order, and gave other elements where the types' sizes differ."""
from __future__ import annotations

import pytest
import torch
import vitrify

RESHAPES = {"t_": lambda v: v.t_(), "transpose_": lambda v: v.transpose_(0, 1), "unsqueeze_, transpose_": lambda v: v.unsqueeze_(0).transpose_(0, 2), "squeeze_": lambda v: v.squeeze_()}


@pytest.mark.compiled("views need no kernel")
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad], ids=lambda m: m.__name__)
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64, torch.uint16], ids=str)
@pytest.mark.parametrize("reshape", RESHAPES)
def test_results(reshape, dtype, mode):
    def f(x):
        v = x.view(dtype)
        RESHAPES[reshape](v)
        return v, x * 2

    compiled = vitrify.compile(f)
    for sizes in ((4, 2), (4, 4), (2, 4)):
        with mode():
            x = torch.randn(sizes)
            for _ in range(2):
                a, b = compiled(x)[0], f(x)[0]
                assert (a.shape, a.stride(), a.dtype, a._is_view()) == (b.shape, b.stride(), b.dtype, b._is_view())
                assert torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))
