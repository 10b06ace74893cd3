"""A capture looks at what gradients of the program's own go through. What lies behind the tensors that the program reaches is eager's: hooks on nodes there do not run."""
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
