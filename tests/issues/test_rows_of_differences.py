"""Rows of docs/differences.md: what is to be seen there is neither eager's nor an accident."""
import expects
import pytest
import torch
import vitrify
from torch.utils.checkpoint import checkpoint


def test_an_argument_of_a_checkpoint_that_its_gradient_does_not_read():
    w = torch.ones(3, requires_grad=True)
    told = []
    for f in (lambda x: checkpoint(lambda x, w: x + w.sin(), x, w, use_reentrant=False), vitrify.compile(lambda x: checkpoint(lambda x, w: x + w.sin(), x, w, use_reentrant=False), fullgraph=True)):
        x = torch.ones(3)
        y = f(x)
        x.add_(1)
        try:
            told.append(torch.autograd.grad(y.sum(), w)[0])
        except RuntimeError as e:
            told.append(str(e))
    assert "modified by an inplace operation" in told[0]
    torch.testing.assert_close(told[1], w.detach().cos())


def test_parts_written_where_the_gradient_reads_them():
    w = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    f = lambda: w.softmax(-1).unsafe_chunk(2)[0]  # noqa: E731
    right, = torch.autograd.grad((f() * torch.tensor([1.0, 2.0])).sum(), w)
    y = f()
    y.mul_(2)
    assert not torch.allclose(torch.autograd.grad((y * torch.tensor([0.5, 1.0])).sum(), w)[0], right)
    y = vitrify.compile(f, fullgraph=True)()
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad((y * torch.tensor([0.5, 1.0])).sum(), w)


@pytest.mark.parametrize("n", [0, 3])
def test_indexed_writes_of_a_tensor_by_itself(n):
    if not n:
        expects.compiled("there is nothing to compute")

    def dead(x):
        y = x * 2
        y.index_add_(0, torch.arange(len(x)), y)
        return x + 1

    def live(x):
        x.index_add_(0, torch.arange(0), x)
        return x
    f = live if n == 0 else dead
    with pytest.raises(RuntimeError, match="single memory location"):
        f(torch.rand(n))
    x = torch.rand(n)
    assert torch.equal(vitrify.compile(f, fullgraph=True)(x), x + 1)
