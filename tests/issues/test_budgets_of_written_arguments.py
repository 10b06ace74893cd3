"""A memory budget lets calls run again in the backward. What a program has written to an argument is read as it is by then: what it was before, nobody has."""
import pytest
import torch
import vitrify

PROGRAMS = {
    "complex": lambda x: torch.complex(x, x).abs(), "fft": lambda x: torch.fft.fft(x).abs(), "its square": lambda x: (lambda h: (h * h).real)(torch.fft.fft(x)),
    "view_as_real": lambda x: torch.view_as_real(torch.complex(x, x) ** 2), "mm": lambda x: (x[:, None] @ x[None]).sin(), "mm alone": lambda x: x[:, None] @ x[None],
    "cumsum": lambda x: torch.cumsum(x, 0).square(), "softmax of mm": lambda x: (x[:, None] @ x[None]).softmax(1)[:, 0],
}
WRITES = {"mul_": lambda x: x.mul_(2), "add_": lambda x: x.add_(1), "twice": lambda x: x.mul_(2).add_(1), "exp_": lambda x: x.exp_(), "a part": lambda x: x[1:].mul_(3)}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("budget", [1, 0.99, 0.5, 0])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name, write, budget):
    def f(x):
        WRITES[write](x)
        return PROGRAMS[name](x)

    def gradients(f):
        x = torch.linspace(0.1, 1, 3).requires_grad_()
        w = torch.linspace(1, 2, 3)
        out = f(x * 1)
        first, = torch.autograd.grad(out.sum(), x, create_graph=True)
        return [out, first, *torch.autograd.grad((first * w).sum(), x), *torch.autograd.grad(f(x * 1).square().sum(), x)]
    compiled = vitrify.compile(f, fullgraph=True, options={"memory_budget": budget})
    for ours, theirs in zip(gradients(compiled), gradients(f), strict=True):
        torch.testing.assert_close(ours, theirs)
