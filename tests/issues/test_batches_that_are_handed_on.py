"""A gradient that is the one that comes, as it lies: of a batch too, for which ATen has no rule for aliases; with dynamic=True that was an error."""
import pytest
import torch
import vitrify

PROGRAMS = {
    "scatter": lambda x: x.as_strided_scatter(torch.ones(2), (2,), (1,)), "scattered, then masked": lambda x: (lambda v: v.masked_scatter_(v > 0, v))(x.as_strided_scatter(torch.ones(2), (2,), (1,))),
    "with a view": lambda x: x.as_strided_scatter(torch.ones(2), (2,), (1,)).view(2, 4) * 2,
}


@pytest.mark.no_kernels("nothing but views and library calls", some=True)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_batched(name, dynamic):
    compiled = vitrify.compile(PROGRAMS[name], dynamic=dynamic)
    for count in (8, 10 if name != "with a view" else 8):
        def gradient(f):
            x = torch.linspace(-1, 1, count, requires_grad=True)
            y = f(x)
            return torch.autograd.grad(y, x, torch.eye(3, count).view(3, *y.shape), is_grads_batched=True)[0]
        ours, eager = gradient(compiled), gradient(PROGRAMS[name])
        assert torch.equal(ours, eager)
