"""A kernel in tiles that reads another operand by an index from memory asked for that operand's next row ahead, by an address of the wrong type: LLVM crashed."""
import bounds
import pytest
import torch
import vitrify


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dim", [1, -3, 2])
def test_gather_in_tiles(dim, dtype):
    def f(x, y):
        x, y = x.clone(), y.clone()
        y.scatter_(dim, y.argsort(dim), x)
        z = x.exp()
        return z * z * 2, y.relu()
    results = []
    for g in (vitrify.compile(f), f):
        torch.manual_seed(0)
        x = torch.rand(16, 7, 7, 16, dtype=dtype).permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0).requires_grad_()
        y = torch.rand(16, 7, 7, 32, dtype=dtype)[..., ::2]
        out = g(x, y)
        results.append((*out, *torch.autograd.grad(sum(t.sum() for t in out), x)))
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager, **bounds.DEEP)
