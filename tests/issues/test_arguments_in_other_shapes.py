"""Calls that change how an argument lies: its gradient, and those of others, are of what it was."""
import pytest
import torch
import vitrify


def unread(x, y):
    x = x.clone()
    y.squeeze_()
    return x


def read_before(x, y):
    z = x * y
    y.squeeze_()
    return z


def turned_after(x, y):
    z = x * y
    y.transpose_(0, 1)
    return z


def turned_and_written(x, y):
    z = x * y
    y.transpose_(0, 1).add_(1)
    return z + 1


def turned_before(x, y):
    y.transpose_(0, 1)
    return x.transpose(0, 1) * y


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("fn", [unread, read_before, turned_after, turned_and_written, turned_before])
def test_gradients(fn, dynamic, twice):
    def outcome(f, sizes):
        g = torch.Generator().manual_seed(0)
        x, y = torch.randn(sizes, generator=g).requires_grad_(), torch.randn(sizes, generator=g)
        out = f(x, y)
        try:
            if twice:
                first, = torch.autograd.grad(out.square().sum(), x, create_graph=True)
                first.square().sum().backward()
            else:
                out.sum().backward()
        except RuntimeError as e:
            return str(e).partition("\n")[0]
        return x.grad, y, y.shape, y.stride(), y._version
    compiled = vitrify.compile(fn, dynamic=dynamic, fullgraph=True)
    for sizes in ((2, 8, 1, 7), (3, 3, 1, 7), (2, 2, 1, 2)):
        expected, got = outcome(fn, sizes), outcome(compiled, sizes)
        if isinstance(expected, str):
            assert got == expected
        else:
            torch.testing.assert_close(got, expected)
