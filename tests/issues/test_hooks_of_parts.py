"""Hooks of one part of what an op splits, which is returned, where another part goes into an independent result: they see all of the gradient."""
import expects
import pytest
import torch
import vitrify

D = torch.float64
PROGRAMS = {"unbind": lambda b, w: (lambda v, u: (v.sigmoid(), v, u * w[0]))(*b.unbind(0)), "chunk": lambda b, w: (lambda v, u: (v.sigmoid(), v, torch.var_mean(u, 0, correction=0)[1] * w))(*b.chunk(2)),
            "split": lambda b, w: (lambda v, u: (v * 2, v, (u * 2) * w))(*b.split(1)), "of a value": lambda b, w: (lambda v, u: (v * 2, v, (u * 2) * w))(*(b * 2).split(1)),
            "both": lambda b, w: (lambda v, u: (v.sigmoid(), v, u, u * w[0]))(*b.unbind(0)), "slice": lambda b, w: (lambda v: (v.sigmoid(), v, v * w))(b[:1])}


@pytest.mark.parametrize("kept", [False, True], ids=["hook", "retain_grad"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_hooks(name, kept):
    if name not in ("both", "slice"):
        expects.eager("returns a part of what it splits")

    def told(compile):
        w, b, seen = torch.full((2, 3), 2.0, dtype=D, requires_grad=True), torch.ones(2, 3, dtype=D, requires_grad=True), []
        y = compile(lambda b: PROGRAMS[name](b, w))(b)
        if kept:
            y[1].retain_grad()
        else:
            y[1].register_hook(lambda g: seen.append(g.tolist()) or g * 3)
        torch.autograd.backward([y[1].sum(), y[0].sum()])
        return b.grad.tolist(), seen, kept and y[1].grad.tolist(), w.grad
    torch.testing.assert_close(told(vitrify.compile), told(lambda f: f))
