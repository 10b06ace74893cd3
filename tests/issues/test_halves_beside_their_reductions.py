"""A chain of halves that the backward computes again rounded in other places than the forward had, and met there what a reduction of the forward's had made
of it: `x - tanh(x)` after a pad, then a layer norm, gave a weight gradient ten times as far from double precision as eager's, `logsumexp` of a product likewise."""
from __future__ import annotations

import statistics

import pytest
import torch
import torch.nn.functional as F
import vitrify

CHAINS = {
    "tanhshrink of a pad": lambda x: F.tanhshrink(F.pad(x, (-1, 1), value=0.5)),
    "sums of products": lambda x: F.tanhshrink(F.pad(x, (-1, 1), value=0.5)) * 1.3 + 0.2 * x,
}
REDUCTIONS = {
    "layer_norm": lambda h, w: F.layer_norm(h, (3,), w[:3]),
    "group_norm": lambda h, w: F.group_norm(h, 4, w),
    "batch_norm": lambda h, w: F.batch_norm(h, None, None, w, training=True),
    "rms_norm": lambda h, w: F.rms_norm(h, (3,), w[:3]),
    "logsumexp": lambda h, w: (h * 40).logsumexp(-1) * w,
    "std": lambda h, w: h.std(-1) * w,
}


def error(a, truth):
    return ((a.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("chain", CHAINS)
def test_gradients_are_as_accurate_as_eagers(chain, reduction, dtype):
    def f(x, w):
        return REDUCTIONS[reduction](CHAINS[chain](x), w)

    compiled, errors = vitrify.compile(f), []
    for seed in range(15):
        torch.manual_seed(seed)
        x, w = torch.randn(4, 8, 3).to(dtype), (torch.rand(8) + 0.5).to(dtype)
        gradients = []
        for of, kind in ((f, torch.float64), (f, dtype), (compiled, dtype)):
            args = [t.to(kind, copy=True).requires_grad_() for t in (x, w)]
            y = of(*args)
            gradients.append(torch.autograd.grad(y, args, torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype).to(kind)))
        errors.append([[error(g, truth) for g, truth in zip(gs, gradients[0])] for gs in gradients[1:]])
    for i in range(2):
        eager, ours = (statistics.median(side[i] for side in (pair[k] for pair in errors)) for k in (0, 1))
        assert ours <= 2 * eager, (i, ours, eager)
