"""What copy_ puts elsewhere is other memory: writes to one are none to the other."""
import pytest
import torch
import vitrify
from torch import nn


def row(m, e):
    m.kept.copy_(e.detach()[0])
    return e


def mean(m, e):
    m.kept.copy_(e.detach().mean(0))
    return e * m.kept.clone()


def read(m, e):
    m.kept.copy_(e.detach().mean(0))
    return e * m.kept


def beside(m, e):
    w = e.detach().sum(0)
    m.kept.copy_(w)
    return e * w


def followed(m, e):
    w = e.sum(0)
    m.kept.copy_(w.detach())
    return e * w.tanh() + w * w


def whole(m, e):
    m.all.copy_(e.detach())
    return e


def transposed(m, e):
    m.other.copy_(e.detach().t())
    return e * m.other.t().clone()


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        for name, sizes in dict(kept=[16], all=[7, 16], other=[16, 7]).items():
            self.register_buffer(name, torch.zeros(sizes))

    def forward(self, x):
        return self.body(self, x.exp()).sum()


@pytest.mark.parametrize("body", [row, mean, read, beside, followed, whole, transposed])
def test_a_buffer_that_two_calls_write(body):
    def outcome(wrap):
        m = Net(body)
        f, x = wrap(m), torch.randn(7, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        first, second = f(x), f(x)
        try:
            second.backward()
            first.backward()
        except RuntimeError as e:
            return str(e).partition("\n")[0]
        return [x.grad, *m.buffers()] + [b._version for b in m.buffers()]
    expected, got = outcome(lambda m: m), outcome(lambda m: vitrify.compile(m, fullgraph=True))
    if isinstance(expected, str):
        assert got == expected
    else:
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)], ids=str)
def test_a_result_that_is_a_copy(dims):
    def fn(x):
        e = x.exp().permute(dims)
        z = torch.empty_like(e)
        z.copy_(e.detach())
        return z, e.sum()

    def outcome(f):
        x = torch.randn(7, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        z, loss = f(x)
        z.add_(1)
        loss.backward()
        return x.grad, z, z.stride()
    torch.testing.assert_close(outcome(vitrify.compile(fn, fullgraph=True)), outcome(fn))
