"""What is on around a derivative alone, and was not around the call: modes, hooks on saved tensors, forward-mode tangents; and memory that was freed meanwhile."""
import pytest
import torch
import torch.autograd.forward_ad as fw
import vitrify
from expects import eager
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

PROGRAMS = {"sine": lambda x, w: (x * w).sin() * x, "of one": lambda x, w: x * 2 + w, "product": lambda x, w: torch.tanh(x @ w), "transposed": lambda x, w: (x.t() * w).exp()}


class Twice(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.products += func is torch.ops.aten.mul.Tensor
        return out * 2 if func is torch.ops.aten.mul.Tensor else out


def leaves():
    torch.manual_seed(0)
    return torch.randn(4, 4, dtype=torch.double, requires_grad=True), torch.randn(4, 4, dtype=torch.double, requires_grad=True)


def same(run, name, compiled=None):
    expected, ours = run(PROGRAMS[name]), run(compiled or vitrify.compile(PROGRAMS[name]))
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.eager("op by op: a mode sees", some=True)
def test_a_mode_sees_what_a_derivative_calls_and_may_change_it(name, create_graph):
    def run(f):
        x, w = leaves()
        y = f(x, w)
        with Twice() as mode:
            g = torch.autograd.grad(y.sum(), (x, w), create_graph=create_graph)
        return *g, torch.tensor(mode.products > 0)
    same(run, name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mode_that_changes_nothing_leaves_later_derivatives(name):
    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def run(f):
        x, w = leaves()
        y = f(x, w)
        with Looks():
            g = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
        if not any(t.requires_grad for t in g):
            return g
        return *g, *torch.autograd.grad(sum((t ** 3).sum() for t in g if t.requires_grad), (x, w), allow_unused=True, materialize_grads=True)
    same(run, name)


@pytest.mark.parametrize("name", ["sine", "product"])
def test_hooks_that_may_change_what_a_derivative_saves(name):
    """No plan may stand for a derivative that saves other tensors: that is said, and the next call is eager's."""
    eager("hooks on saved tensors, which may give back something else")

    def run(f):
        x, w = leaves()
        y = f(x, w)
        with saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            g, = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(g.sum(), (x, w))
    compiled = vitrify.compile(PROGRAMS[name])
    with pytest.raises(RuntimeError, match="hooks on saved tensors, which may give back something else than they are given, are around them; calls from now on run eagerly"):
        run(compiled)
    same(run, name, compiled)


@pytest.mark.parametrize("hooks", [save_on_cpu, lambda: saved_tensors_hooks(vitrify.mark_lossless(lambda t: t), lambda t: t)], ids=["torch's", "marked"])
@pytest.mark.parametrize("name", ["sine", "product"])
def test_hooks_that_give_back_what_they_are_given(name, hooks):
    def run(f):
        x, w = leaves()
        y = f(x, w)
        with hooks():
            g, = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(g.sum(), (x, w))
    same(run, name)
    assert vitrify.counters["eager_calls"] == 0


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.eager("op by op: they come by tangents", some=True)
def test_forward_over_reverse(name):
    def run(f):
        x, w = leaves()
        y = f(x, w)
        with fw.dual_level():
            g = torch.autograd.grad(y, (x, w), fw.make_dual(torch.ones_like(y), y.detach() * 2 + 1))
            return [t for d in g for t in fw.unpack_dual(d)]
    same(run, name)


@pytest.mark.eager("they come by tangents that are no plain tensors")
def test_forward_over_reverse_that_is_differentiated():
    def run(f):
        x, w = leaves()
        y = f(x, w)
        with fw.dual_level():
            g, = torch.autograd.grad(y, x, fw.make_dual(torch.ones_like(y), torch.ones_like(y)), create_graph=True)
            return list(fw.unpack_dual(g))
    compiled = vitrify.compile(PROGRAMS["sine"])
    with pytest.raises(RuntimeError, match="no plain tensors; calls from now on run eagerly"):
        run(compiled)
    same(run, "sine", compiled)


@pytest.mark.parametrize("which", ["x", "w"])
def test_memory_that_is_freed_before_the_backward(which):
    """Eager's formulas raise as they read it, where they are views of it; others end the process there."""
    def run(f):
        x, w = leaves()
        y = f(x, w)
        (x if which == "x" else w).untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="setStorage|no memory"):
            torch.autograd.grad(y.sum(), (x, w))
    run(PROGRAMS["product"])
    run(vitrify.compile(PROGRAMS["product"]))


@pytest.mark.no_kernels("no call computes")
def test_memory_that_is_freed_before_the_call():
    w = torch.ones(4, 4)
    w.untyped_storage().resize_(0)
    with torch.no_grad(), pytest.raises(RuntimeError, match="data is not allocated"):
        vitrify.compile(PROGRAMS["product"])(torch.ones(4, 4), w)


def test_memory_that_comes_back():
    """As sharded weights do between the passes."""
    def run(f):
        x, w = leaves()
        for _ in range(3):
            y = f(x, w)
            kept, storage = w.detach().clone(), w.untyped_storage()
            storage.resize_(0)
            storage.resize_(kept.untyped_storage().nbytes())
            w.data.copy_(kept)
            y.sum().backward()
        return x.grad, w.grad
    same(run, "product")
