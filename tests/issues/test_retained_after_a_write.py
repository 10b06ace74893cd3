"""retain_grad() of a value that the program reaches, after a write to it: a capture that ends there puts the history back, and left the tensor as one that retains a gradient without its hook. What ran eagerly then was an internal error of autograd's."""
import beside
import pytest
import torch
import vitrify
from torch import nn

PROGRAMS = {"written": "h.sin_(); h.retain_grad(); return h * 1", "without gradients": "h.sin_()\n    with torch.no_grad(): h.retain_grad()", "a view of it": "v = h[0]; h.sin_(); v.retain_grad(); return h * 1", "by a view": "h[0].mul_(2); h.retain_grad(); return h.sum()",
            "read": "h.mul_(w); r = h.grad_fn; h.retain_grad()", "detached": "h.detach_(); h.retain_grad()", "before": "h.retain_grad(); h.sin_(); return h * 2"}


@pytest.mark.eager("reads retain_grad of a tensor", "reads grad_fn of a tensor", "in a way that gradients must follow", "which retains its gradient", some=True)
@pytest.mark.no_kernels("one only detaches")
@pytest.mark.parametrize("name", PROGRAMS)
def test_retained(name):
    def told(compile):
        w = nn.Parameter(torch.ones(3, 3))
        h = w + w
        f, seen = compile(beside.program(PROGRAMS[name], w=w, h=h)), []
        for _ in range(3):
            try:
                r = f(None)
                (h if r is None else r).sum().backward(retain_graph=True)
                seen.append((h.retains_grad, h.grad is not None and h.grad.tolist(), w.grad.tolist()))
            except RuntimeError as e:
                seen.append(str(e).partition("\n")[0])
        return seen
    assert told(vitrify.compile) == told(lambda f: f)
