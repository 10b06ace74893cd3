"""Batched gradients lie in memory as eager's, whose formulas are others for a batch, and whose library calls for each element of it are put one after the other."""
import pytest
import torch
import torch.nn.functional as F
import vitrify


def permuted(*shape):
    return torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))


def written(x):
    x = x.clone()
    x.mT.add_(1)
    return x


PROGRAMS = {
    "max": (lambda x: x.max(), lambda n: permuted(n, 4, 8, 8)),
    "min of a column": (lambda x: x.min() * 2, lambda n: permuted(33 + n, 1, 1)),
    "median": (lambda x: x.sin().median(), lambda n: permuted(n, 5, 4)),
    "nanmedian": (lambda x: x.nanmedian(), lambda n: permuted(n, 5, 4)),
    "masked by a value": (lambda x: torch.zeros(x.shape).masked_fill(x.detach() > 0, x.sum()) + x, lambda n: permuted(n, 5, 4)),
    "written through a view": (written, lambda n: torch.randn(6, 10, n).mT),
    "written and used": (lambda x: written(x) * 2, lambda n: torch.randn(6, 10, n).mT),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), lambda n: torch.randn(3, 4, 4, 8 * n)),
    "found sizes": (lambda x: (torch.poisson(x.abs()), x[x > 99])[0], lambda n: torch.randn(8 * n)),
    "sorted": (lambda x: x.sort(0).values, lambda n: permuted(n, 5, 4)),
    "nanmean": (lambda x: torch.nanmean(x, -1), lambda n: permuted(3, n, 6)),
    "nanmean of halves": (lambda x: torch.nanmean(x.half(), -1).float(), lambda n: permuted(3, n, 6)),
    "dropped max of a column": (lambda x: F.dropout(x.max(), 0.2), lambda n: permuted(3 + n, 1, 1)),
    "sum": (lambda x: x.sum(), lambda n: permuted(n, 5, 4)),
}


ONE_BY_ONE = ("written through a view", "written and used", "nanmean of halves")  # where sizes change, ATen has no rule for a batch of them: docs/differences.md


@pytest.mark.parametrize("name, dynamic", [(n, d) for n in PROGRAMS for d in (False, True) if not (d and n in ONE_BY_ONE)])
@pytest.mark.judged("batches of some run op by op")
def test_strides(name, dynamic):
    f, make = PROGRAMS[name]
    compiled = vitrify.compile(f, dynamic=dynamic)
    for n in (2, 3, 2):
        told = []
        for run in (f, compiled):
            torch.manual_seed(n)
            x = make(n).requires_grad_()
            out = run(x)
            eye = torch.eye(min(3, out.numel()), out.numel()).view(-1, *out.shape)
            told.append(torch.autograd.grad(out, x, eye, is_grads_batched=True)[0])
        torch.testing.assert_close(told[1], told[0])
        assert told[1].stride() == told[0].stride(), n
