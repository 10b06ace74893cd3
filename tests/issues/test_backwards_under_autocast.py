"""backward() called under autocast: eager's formulas compute in the state of the caller, whatever the forward ran in. Derivatives are taken for each such state."""
import pytest
import torch
import vitrify
from torch.utils.checkpoint import checkpoint


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


PROGRAMS = {
    "product": lambda x, w: (x @ w).tanh(), "own formula": lambda x, w: Product.apply(x, w).sin(), "two": lambda x, w: ((x @ w).tanh(), x.sin() @ w),
    "checkpoint": lambda x, w: checkpoint(lambda x, w: (x @ w).tanh() @ w, x, w, use_reentrant=False),
}


def under(dtype):
    return torch.autocast("cpu", dtype, enabled=dtype is not None)


def all_in(f, x, w, dtypes):
    for dtype in dtypes:
        y = f(x, w)
        y = y if isinstance(y, torch.Tensor) else y[0] + y[1]
        with under(dtype):
            y.square().sum().backward()
        yield from (x.grad, w.grad)
        x.grad = w.grad = None


def one_in(f, x, w, dtypes):
    for dtype in dtypes:
        y = f(x, w)
        y = y if isinstance(y, torch.Tensor) else y[0]
        with under(dtype):
            yield from torch.autograd.grad(y, (x, w), torch.ones(4, 4), retain_graph=True)
            yield from torch.autograd.grad(y, x, torch.eye(16).view(16, 4, 4), is_grads_batched=True)


def again_in(f, x, w, dtypes):  # the second derivative is one sum of two in eager, so it is taken of the gradient alone
    for dtype in dtypes:
        y = f(x, w)
        y = y if isinstance(y, torch.Tensor) else y[0]
        v = torch.ones(4, 4, requires_grad=True)
        with under(dtype):
            g, = torch.autograd.grad(y, x, v, create_graph=True)
            yield from (g, *torch.autograd.grad(g.sum(), v))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), (None, torch.bfloat16, None), (torch.float16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("way", [all_in, one_in, again_in])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_the_caller_has_it(name, way, dtypes):
    torch.manual_seed(0)
    values = torch.randn(4, 4), torch.randn(4, 4)
    ours, eager = ([g.clone() for g in way(f, *(t.clone().requires_grad_() for t in values), dtypes)]
                   for f in (vitrify.compile(PROGRAMS[name]), PROGRAMS[name]))
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b)
