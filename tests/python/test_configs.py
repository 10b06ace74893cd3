"""The same programs under hostile settings: every stage switched off in turn, no fusion, the slow interpreter, other instruction sets."""
import bounds
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vitrify


def chain(x, r, w):
    y = F.layer_norm(x + r, (x.shape[-1],), w, w)
    return torch.softmax(F.gelu(y * 0.5 + w) + x, -1), y.amax(0)


def views(x, r, w):
    y = torch.cat([x.t().contiguous()[:16], r.t()[:16] * 2], 1)
    z = y.view(4, 4, -1).permute(1, 0, 2).reshape(16, -1)
    return z.cumsum(1), z[..., 1::3], torch.stack([x[0], w])


def inplace(x, r, w):
    y = x.clone()
    y[:, ::2] += r[:, 1::2]
    y[3].mul_(w)
    r.add_(1)
    return y.sum(0), y.argmax(1), (y > 0).any(1)


def indices(x, r, w):
    i = torch.arange(x.shape[0]) % 5
    out = torch.zeros(5, x.shape[1]).index_add(0, i, x)
    return out, out[i] * r, F.embedding(i, r), x.to(torch.bfloat16).float().std(1)


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1)
        self.fc = nn.Linear(16, 10)

    def forward(self, x):
        y = F.relu(self.n(self.a(x)))
        y = F.relu(self.b(y) + y)
        return self.fc(F.max_pool2d(y, 2).mean((2, 3)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(256, 512), nn.Linear(512, 256), nn.LayerNorm(256)

    def forward(self, x):
        return self.norm(x + self.down(F.gelu(self.up(x))))


CONFIGS = [dict(gemm="onednn"), dict(gemm="mkl"), dict(gemm="aten"), dict(gemm="vitrify"), dict(fusion="off"), dict(backend="interp"), dict(target="x86-64-v2"), dict(target="x86-64-v3"), dict(verify=True), dict(packed_weight_mb=0)] + [
    dict(disable=[s]) for s in ("canonicalize", "cse", "dce", "fold_batch_norm", "fuse_conv", "fuse_linear", "small_matmul", "own_attention", "fuse_segments", "hoist_frozen")]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("options", CONFIGS, ids=lambda o: "-".join(f"{k}={v[0] if isinstance(v, list) else v}" for k, v in o.items()))
@pytest.mark.parametrize("program", [chain, views, inplace, indices, "conv", "block"], ids=lambda p: p if isinstance(p, str) else p.__name__)
def test_same_result_under(program, options):
    torch.manual_seed(0)
    with torch.no_grad():
        if program == "conv":
            f, args = Conv().eval(), (torch.randn(2, 3, 12, 12),)
        elif program == "block":
            f, args = Block().eval(), (torch.randn(4, 16, 256),)
        else:
            f, args = program, (torch.randn(24, 40), torch.randn(24, 40), torch.randn(40))
        theirs, ours = [a.clone() for a in args], [a.clone() for a in args]
        want = f(*theirs)
        before = dict(vitrify.counters)
        got = vitrify.compile(f, fullgraph=True, options=options)(*ours)
        assert vitrify.counters["kernels_launched"] > before["kernels_launched"]
        for w, g in zip(want if isinstance(want, tuple) else (want,), got if isinstance(got, tuple) else (got,)):
            torch.testing.assert_close(g, w, **bounds.OPTIONS)
            assert g.stride() == w.stride()
        for a, b in zip(theirs, ours):
            torch.testing.assert_close(b, a, rtol=0, atol=0)
