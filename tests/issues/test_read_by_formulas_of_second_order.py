"""Some of eager's formulas read a matrix only where they are differentiated themselves, and what was made of it elsewhere: a gradient of which they are
no part has kept it for those behind."""
import pytest
import torch

import vitrify

OPS = {
    "solve": lambda x, w: torch.linalg.solve(w * 0.1, x),
    "solve from the right": lambda x, w: torch.linalg.solve(w + 1, x, left=False),
    "tensorsolve": lambda x, w: torch.linalg.tensorsolve((w * w).reshape(3, 3), x[0]).expand(3, 3),
    "det": lambda x, w: torch.linalg.det(w + 1) * x,
    "slogdet": lambda x, w: torch.linalg.slogdet(w + 1)[1] * x,
    "inv": lambda x, w: torch.linalg.inv(w + 1) @ x,
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("asked", ["y", "yx", "x", "yxw"])
@pytest.mark.parametrize("name", OPS)
def test_gradients_asked_for_in_turn(name, asked, dynamic):
    def f(x, y, w):
        t = OPS[name](x, w)
        return t * y, t

    def gradients(f):
        torch.manual_seed(0)
        of = {n: torch.randn(3, 3, dtype=torch.float64) for n in "xyw"}
        of["w"] += 3 * torch.eye(3)
        for t in of.values():
            t.requires_grad_()
        a, t = f(of["x"], of["y"], of["w"])
        first = torch.autograd.grad(a.square().sum(), [of[n] for n in asked], create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first) + t.sum(), list(of.values()), create_graph=True)
        return [*first, *second, *torch.autograd.grad(sum(g.sum() for g in second), list(of.values()), allow_unused=True)]

    compiled = vitrify.compile(f, dynamic=True) if dynamic else vitrify.compile(f)
    for _ in range(2):
        for ours, eager in zip(gradients(compiled), gradients(f)):
            torch.testing.assert_close(ours, eager, rtol=1e-8, atol=1e-8)
