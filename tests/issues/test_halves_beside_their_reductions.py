"""A chain of halves was rounded where it happened to go to memory: what the backward computed again met what a reduction of the forward's had made of other
numbers, and gradients were up to a thousand times as far from double precision as eager's. Each op's result is rounded, as eager's is, in both."""
from __future__ import annotations

import statistics

import pytest
import torch
import torch.nn.functional as F
import vitrify

CHAINS = {
    "tanhshrink of a pad": lambda x: F.tanhshrink(F.pad(x, (-1, 1), value=0.5)),
    "sums of products": lambda x: F.tanhshrink(F.pad(x, (-1, 1), value=0.5)) * 1.3 + 0.2 * x,
    "cube": lambda x: x * x * x * 0.5,
}
REDUCTIONS = {
    "layer_norm": lambda h, w: F.layer_norm(h, (3,), w[:3]),
    "group_norm": lambda h, w: F.group_norm(h, 4, w),
    "batch_norm": lambda h, w: F.batch_norm(h, None, None, w, training=True),
    "rms_norm": lambda h, w: F.rms_norm(h, (3,), w[:3]),
    "logsumexp": lambda h, w: (h * 40).logsumexp(-1) * w,
    "std": lambda h, w: h.std(-1) * w,
    "logsumexp in float": lambda h, w: (h * 40).to(wider(h)).logsumexp(-1) * w,
    "layer_norm in float": lambda h, w: F.layer_norm(h.to(wider(h)), (3,), w[:3].to(wider(h))),
    "softmax by hand": lambda h, w: ((h * 40).to(wider(h)) - (h * 40).to(wider(h)).logsumexp(-1, keepdim=True)).exp() * w[:, None],
    "logsumexp of one": lambda h, w: ((h * 40)[..., :1] - (h * 40)[..., :1].logsumexp(-1, keepdim=True) + 1) * w[:, None] * h,
    "norm of one": lambda h, w: ((h * 40)[..., :1].abs() - (h * 40)[..., :1].norm(dim=-1, keepdim=True)).exp() * w[:, None] * h,
    "pool of one": lambda h, w: ((h * 40) - F.max_pool1d(h * 40, 1).detach()).exp() * h * w[:, None],
    "logcumsumexp": lambda h, w: (h * 40).to(wider(h)).logcumsumexp(-1) * w[:, None],
}


def wider(h):
    return torch.promote_types(h.dtype, torch.float32)


def error(a, truth):
    return ((a.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("chain", CHAINS)
def test_as_accurate_as_eager(chain, reduction, dtype):
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
            gradients.append([y.detach(), *torch.autograd.grad(y, args, torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype).to(y.dtype))])
        errors.append([[error(g, truth) for g, truth in zip(gs, gradients[0])] for gs in gradients[1:]])
    for i in range(3):
        eager, ours = (statistics.median(side[i] for side in (pair[k] for pair in errors)) for k in (0, 1))
        assert ours <= 1.2 * eager, (i, ours, eager)
