"""Eager raises of an op that has no derivative where a backward comes to it without a gradient, too."""
import pytest
import torch

import vitrify


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return None


PROGRAMS = {
    "alone": lambda x, y, w: (torch.heaviside(x, y) * w,),
    "beside": lambda x, y, w: (torch.heaviside(x, y) * w, w.exp()),
    "shared": lambda x, y, w: (lambda h, k: (h * w, k * x, k.exp()))(torch.heaviside(x, y), y.sin()),
    "of a formula": lambda x, y, w: (torch.nn.functional.huber_loss(x, y, reduction="none") * w, torch.nextafter(x, y) * w),
}


@pytest.mark.parametrize("needs", [True, False], ids=["both", "one"])
@pytest.mark.parametrize("how", ["grad", "inputs", "all"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_raises_all_the_same(name, how, needs):
    f = PROGRAMS[name]

    def outcome(f):
        x, y, w = (torch.full((3,), v, requires_grad=True) for v in (0.5, 0.7, 0.9))
        x.requires_grad_(needs)
        first, *others = f(x, y, w)
        loss = NoGradient.apply(first).sum() + sum(t.sum() for t in others)
        try:
            if how == "grad":
                return [None if g is None else round(g[0].item(), 4) for g in torch.autograd.grad(loss, y, allow_unused=True)]
            loss.backward(inputs=[y] if how == "inputs" else None)
        except RuntimeError as e:
            return str(e)
        return [None if t.grad is None else round(t.grad[0].item(), 4) for t in (x, y, w)]

    compiled = vitrify.compile(f)
    for _ in range(2):
        assert outcome(compiled) == outcome(f)
