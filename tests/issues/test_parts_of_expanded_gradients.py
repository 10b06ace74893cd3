"""A gradient of a gradient by way of parts (select, unbind) of a tangent that is expanded: the parts are of all of it, and of what lies in memory."""
import pytest
import torch
import vitrify

PROGRAMS = {"added": lambda w, b: (torch.stack([w, b]).sum(0) + w * 1, w.square()), "turned": lambda w, b: (torch.stack([b, w]).sum(0) + w * 1, w * 2), "product": lambda w, b: (torch.stack([w, b]).sum(0) * w, w * 2),
            "behind": lambda w, b: (torch.stack([w * 2, b]).sum(0) + w * 1, w * 2), "alike": lambda w, b: (torch.stack([w, w]).sum(0) + b, w * 2), "mean": lambda w, b: (torch.stack([b, w]).mean(0) + w, w.exp()),
            "cat": lambda w, b: (torch.cat([b[None], w[None]]).sum(0) + w, w.exp())}


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name, calls):
    def told(compile):
        w, b = torch.linspace(0.5, 1.5, 3).requires_grad_(), torch.ones(3, requires_grad=True)
        f = compile(lambda b: PROGRAMS[name](w, b))
        y = f(b)
        for _ in range(calls - 1):
            y = f(y[0])
        g, = torch.autograd.grad(y[0].sum() + y[1].sum(), w, create_graph=True)
        second = torch.autograd.grad(g.sin().sum(), [w, b], allow_unused=True) if g.requires_grad else []
        return [None if t is None else [round(x, 4) for x in t.tolist()] for t in (g, *second)]
    assert told(lambda f: vitrify.compile(f, fullgraph=True)) == told(lambda f: f)
