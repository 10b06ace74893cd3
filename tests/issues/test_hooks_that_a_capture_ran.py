"""A capture looks at what gradients of the program's own go through. What lies behind the tensors that the program reaches is eager's: hooks on nodes there do not run."""
import expects
import pytest
import torch
import vitrify
from torch import nn


@pytest.mark.parametrize("program", [lambda h: torch.func.grad(lambda a: (a * a).sum())(h), lambda h: torch.autograd.grad((h * h).sum(), h)[0] * 2, lambda h: torch.func.vjp(lambda a: a.exp(), h)[1](h)[0],
                                     lambda h: torch.func.jvp(lambda a: a.sin() * h.sum(), (h,), (h * 2,))[1].exp()], ids=["grad", "autograd.grad", "vjp", "jvp"])
@pytest.mark.parametrize("kind", ["register_prehook", "register_hook"])
def test_hooks_of_nodes(program, kind):
    def told(compile):
        w, log = nn.Parameter(torch.ones(3)), []
        h = w * 1
        getattr(h.grad_fn, kind)(lambda *_: log.append(kind))
        f = compile(lambda: program(h))
        for _ in range(2):
            out = f()
            log.append("called")
        if out.requires_grad:
            out.sum().backward()
        return log, w.grad is None
    assert told(vitrify.compile) == told(lambda f: f)


def test_one_behind_another():
    """The weight, and what follows from it."""
    def told(compile):
        w, x, log = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 3)), []
        h = w.sin()
        h.grad_fn.register_prehook(lambda *_: log.append("ran"))
        f = compile(lambda x: (torch.func.vjp(lambda a: a.exp(), x)[1](x)[0], w * 0.5, (h * 1) @ x.mT)[2])
        made = [f(x), f(x)]
        log.append("called")
        torch.autograd.grad(made[1].sum(), [w, x])
        return log
    expects.eager("follows from another tensor that it reads")
    assert told(vitrify.compile) == told(lambda f: f)
