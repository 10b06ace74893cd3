"""Gradients that are differentiated again, of a call of which a backward has freed a part: what they read is still there, and what nobody asks for is not read."""
import pytest
import torch
import vitrify
from beside import same_outcome
from torch.autograd import grad

VIEWS = {
    "a weight": lambda w, b: (w.t() * b, w.pow(2)), "a row": lambda w, b: (w[0] * b, w.pow(2)), "turned round": lambda w, b: (w.pow(2), w.t() * b),
    "a result": lambda w, b: (lambda h: (h, h.t() * b, h.pow(2)))(w.exp()), "computed again": lambda w, b: (w.sin().t() * b, w.pow(2), w.cos() * b),
}


def some(*names):
    torch.manual_seed(0)
    return [torch.randn(4, 4, requires_grad=True) for _ in names]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_and_what_it_views(name, at_once):
    def run(f):
        w, b = some("w", "b")
        out, first = f(w, b), []
        try:  # eager raises as well where it comes to what was freed
            if at_once:
                first += grad(out, [w, b], [torch.ones_like(t) for t in out], create_graph=True, retain_graph=False)
            for y in [] if at_once else reversed(out):
                first += [t for t in grad(y.sum(), [w, b], create_graph=True, retain_graph=False, allow_unused=True) if t is not None]
            return out, first, grad(sum(t.sum() for t in first if t.requires_grad), w)
        except RuntimeError as e:
            return out, first, list(str(e).encode())
    same_outcome(run, VIEWS[name])


def test_a_view_and_what_it_views_behind_hooks():
    pack = vitrify.mark_lossless(lambda t: t)

    def run(f):
        w, b = some("w", "b")
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = f(w, b)
        return out, grad(out, [w, b], [torch.ones_like(t) for t in out], create_graph=True, retain_graph=False)
    same_outcome(run, VIEWS["a weight"])


@pytest.mark.compiled("the second derivative leads to nothing")
@pytest.mark.parametrize("more", [True, False])
def test_formulas_that_look_at_what_was_freed(more):
    def program(x, w, b):
        h = x @ w
        return h.prod(0), (h * b).norm()

    def run(f):
        x, w, b = some("x", "w", "b")
        out = f(x, w, b)
        grad(out, x, [torch.ones_like(t) for t in out])
        try:
            return grad(sum(t.sum() for t in out) if more else out[0].sum(), b, allow_unused=True, create_graph=True)
        except RuntimeError as e:
            return str(e)
    same_outcome(run, program)
