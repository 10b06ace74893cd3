"""Saved-tensor hooks may give back something else than they were given, and some do though they are marked lossless: other strides, another dtype, another size. The derivative read it by the record."""
import pytest
import torch
import vitrify
from torch.autograd.graph import saved_tensors_hooks

MOVED = {
    "other strides": lambda t: t.t().contiguous().t(),
    "C order": lambda t: torch.from_numpy(t.numpy().copy()),
    "a window": lambda t: torch.cat([t, t], 1)[:, :t.shape[1]],
}
OTHERS = {"half": lambda t: t.half(), "smaller": lambda t: t[:2], "flat": lambda t: t.reshape(-1), "empty": lambda t: t[:0]}
FNS = {"mm": lambda x, w: (x @ w).exp(), "transposed": lambda x, w: x.t().exp() * w.sum(), "mul": lambda x, w: x * w.t() * 2}


def outcome(f, unpack, create_graph=False, size=(8, 6)):
    x, w = (torch.arange(48.).view(s).div(48).requires_grad_() for s in (size, size[::-1]))
    with saved_tensors_hooks(vitrify.mark_lossless(lambda t: t.detach()), lambda t: unpack(t) if t.dim() == 2 else t):
        y = f(x, w)
    try:
        return list(torch.autograd.grad(y.sum(), [x, w], create_graph=create_graph))
    except (RuntimeError, IndexError) as e:
        return e


@pytest.mark.parametrize("create_graph", [False, True], ids=["", "create_graph"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("unpack", MOVED)
@pytest.mark.parametrize("fn", FNS)
def test_the_same_in_other_memory(fn, unpack, dynamic, create_graph):
    compiled = vitrify.compile(FNS[fn], dynamic=dynamic, fullgraph=True)
    for size in [(8, 6), (6, 8)] if dynamic else [(8, 6)]:
        torch.testing.assert_close(*(outcome(f, MOVED[unpack], create_graph, size) for f in (compiled, FNS[fn])))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("unpack", OTHERS)
@pytest.mark.parametrize("fn", FNS)
@pytest.mark.eager("op by op: what they read has another size or dtype", some=True)
def test_something_else(fn, unpack, dynamic):
    ours, eager = (outcome(f, OTHERS[unpack]) for f in (vitrify.compile(FNS[fn], dynamic=dynamic, fullgraph=True), FNS[fn]))
    if isinstance(eager, Exception):  # where sizes are read off it, another step may be the first to notice
        assert isinstance(ours, Exception) and (dynamic or repr(ours) == repr(eager))
    else:
        torch.testing.assert_close(ours, eager)


CHANGED = {"scaled": lambda t: t * 2, "zero": lambda t: torch.zeros_like(t), "rounded": lambda t: t.round()}


@pytest.mark.parametrize("create_graph", [False, True], ids=["", "create_graph"])
@pytest.mark.parametrize("unpack", CHANGED)
@pytest.mark.parametrize("fn", FNS)
def test_other_values(fn, unpack, create_graph):
    def run(f):
        x, w = (torch.arange(48.).view(s).div(48).requires_grad_() for s in ((8, 6), (6, 8)))
        with saved_tensors_hooks(vitrify.mark_lossless(lambda t: t.detach()), lambda t: CHANGED[unpack](t) if t.dim() == 2 else t):
            y = f(x, w)
        first = torch.autograd.grad(y.sum(), [x, w], create_graph=create_graph)
        return [*first, *(torch.autograd.grad(sum(g.square().sum() for g in first), [x, w]) if create_graph else [])]
    torch.testing.assert_close(run(vitrify.compile(FNS[fn], fullgraph=True)), run(FNS[fn]))


@pytest.mark.eager("what they read has another size or dtype than in the forward")
@pytest.mark.parametrize("fn", ["mul"])
def test_something_else_that_is_differentiated_again(fn):
    """Its derivative is of the record's sizes: the engine refuses, and eager runs the calls after that."""
    compiled = vitrify.compile(FNS[fn])
    with pytest.raises(RuntimeError, match="what they read has another size or dtype than in the forward; calls from now on run eagerly"):
        raise outcome(compiled, OTHERS["smaller"], True)
    ours, eager = (outcome(f, OTHERS["smaller"], True) for f in (compiled, FNS[fn]))
    assert isinstance(eager, RuntimeError) and repr(ours) == repr(eager)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", [(6, 3), (0,), (4, 6), (6, 6), (12, 12)], ids=str)
@pytest.mark.eager("op by op: what they read has another size or dtype", some=True)
def test_frozen_after_the_call(shape, dynamic):
    """Whether a leaf needs gradients was asked when the backward ran; what had been kept was decided when the program ran."""
    def run(f):
        x, w = torch.ones(4, 6, requires_grad=True), torch.ones(6, 6, requires_grad=True)
        y = f(x, w)
        w.requires_grad_(False)
        w.data = torch.full(shape, 2.0).t().contiguous().t() if len(shape) == 2 else torch.ones(shape)
        try:
            y.sum().backward()
        except (RuntimeError, IndexError) as e:
            return e
        return x.grad
    fn = lambda x, w: x.sin() @ w  # noqa: E731
    ours, eager = run(vitrify.compile(fn, dynamic=dynamic)), run(fn)
    if isinstance(eager, Exception):
        assert isinstance(ours, Exception)  # eager's names the step
    else:
        torch.testing.assert_close(ours, eager)
