"""backward(inputs=) of a result runs eager's node of that result, which lets go of what it has saved: the next backward through it is one too many. Where results are independent nothing was let go."""
import pytest
import torch
import vitrify
from torch import nn

PROGRAMS = {"square": lambda w, x: ((x * w).square(), (x * w) * 2), "shared": lambda w, x: (lambda v: (w * v, v * 2))(w + x), "three": lambda w, x: (lambda v: (w + 1, w * v, v * v))(w * x), "one": lambda w, x: ((x * w).sin(),), "apart": lambda w, x: ((x * w).sin(), w.exp()), "leads on": lambda w, x: (lambda z: (z, z * w))((x * w).sin())}
FIRST = {"alone": lambda y, w, x: y[0].sum().backward(inputs=[y[0]]), "all": lambda y, w, x: sum(t.sum() for t in y).backward(inputs=[y[0]]), "last": lambda y, w, x: y[-1].sum().backward(inputs=[y[-1]]), "with x": lambda y, w, x: sum(t.sum() for t in y).backward(inputs=[y[0], x]), "kept": lambda y, w, x: y[0].sum().backward(inputs=[y[0]], retain_graph=True),
         "grad": lambda y, w, x: torch.autograd.grad(y[0].sum(), y[0]), "both": lambda y, w, x: sum(t.sum() for t in y).backward(inputs=[y[0], y[-1]])}
THEN = {"first": lambda y, w, x: y[0].sum().backward(), "last": lambda y, w, x: y[-1].sum().backward(), "w": lambda y, w, x: y[0].sum().backward(inputs=[w]), "all": lambda y, w, x: sum(t.sum() for t in y).backward(), "alone": lambda y, w, x: y[0].sum().backward(inputs=[y[0]])}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("name", PROGRAMS)
def test_twice(name, first, then, dynamic):
    def told(compile):
        w, x, seen = nn.Parameter(torch.ones(3)), torch.full((3,), 2.0, requires_grad=True), []
        f = compile(lambda x: PROGRAMS[name](w, x))
        for _ in range(2):
            y = f(x)
            for step in (FIRST[first], THEN[then], THEN[then]):
                try:
                    step(y, w, x)
                    seen.append([t.grad is not None and [round(g, 4) for g in t.grad.tolist()] for t in (w, x)])
                except RuntimeError as e:
                    seen.append(str(e)[:40])
                    return seen  # which gradients came before it raised is not promised
        return seen
    assert told(lambda f: vitrify.compile(f, fullgraph=True, dynamic=dynamic)) == told(lambda f: f)
