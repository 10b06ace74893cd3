"""A checkpoint calls its function again in the backward, and torch gives back by number what is saved then. A compiled call in it is served as it was the first
time: where the second ran by another plan, or eagerly, gradients were silently of other tensors, or a CheckpointError came that eager does not raise."""
import contextlib

import bounds
import pytest
import torch
import vitrify
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

numpy_copies = vitrify.mark_lossless(lambda t: t.detach().numpy().copy()), vitrify.mark_lossless(torch.from_numpy)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def product(x, w):
    return (x * w).sin() * x.cos()


def attention(x, w):
    return torch.softmax(x @ w.t(), -1) @ w


def hidden(x, w):
    return torch.layer_norm((x * w.exp()).tanh() @ w, (3,)) * x


PROGRAMS = [product, attention, hidden]
AROUND = {
    "nothing": contextlib.nullcontext, "saved on the CPU": torch.autograd.graph.save_on_cpu, "identity": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "detached": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t), "numpy": lambda: torch.autograd.graph.saved_tensors_hooks(*numpy_copies),
}


def inputs(leaf=True):
    torch.manual_seed(0)
    x, w = (torch.rand(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return (x, w, x, w) if leaf else (x, w, x * 1, w * 1)


def same(ours, eager):
    for a, b in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b, **bounds.DEEP)


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "result"])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("f", PROGRAMS)
def test_one_tensor_twice_behind_other_hooks(f, around, leaf):
    """Which unpack it to two."""
    def run(f):
        x, _, h, _ = inputs(leaf)
        with AROUND[around]():
            y = checkpoint(f, h, h, use_reentrant=False)
        return torch.autograd.grad(y.sum(), x)
    same(run(vitrify.compile(f)), run(f))


@pytest.mark.parametrize("f", PROGRAMS)
def test_one_tensor_twice_in_two_checkpoints(f):
    def run(f):
        x, _, h, _ = inputs(False)
        y = checkpoint(lambda a, b: checkpoint(f, a, b, use_reentrant=False), h, h, use_reentrant=False)
        return torch.autograd.grad(y.sum(), x)
    same(run(vitrify.compile(f)), run(f))


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.eager("detect_anomaly is on", "a TorchDispatchMode is active", "ran eagerly the first time", "op by op: a mode sees", some=True)
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward", "both"])
@pytest.mark.parametrize("mode", [torch.autograd.detect_anomaly, Mode, lambda: FlopCounterMode(display=False)], ids=["anomaly", "mode", "flops"])
@pytest.mark.parametrize("f", PROGRAMS)
def test_a_mode_around_one_of_them(f, mode, where, calls):
    def run(f):
        x, w, *_ = inputs()
        with mode() if where != "backward" else contextlib.nullcontext():
            y = checkpoint(lambda a, b: f(a, b) if calls == 1 else f(b, f(a, b)), x, w, use_reentrant=False)
        with mode() if where != "forward" else contextlib.nullcontext():
            return torch.autograd.grad(y.sum(), (x, w))
    compiled = vitrify.compile(f)
    for _ in range(2):
        same(run(compiled), run(f))


@pytest.mark.eager("op by op: a mode sees")
def test_a_mode_sees_what_is_computed_again():
    def flops(f):
        x, w, *_ = inputs()
        with set_checkpoint_early_stop(False):  # a compiled call computes all that it saves, and then saves it
            y = checkpoint(f, x, w, use_reentrant=False)
        with FlopCounterMode(display=False) as count:
            torch.autograd.grad(y.sum(), (x, w))
        return count.get_total_flops()
    assert flops(vitrify.compile(attention)) == flops(attention)


@pytest.mark.eager("recompile_limit", some=True)
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
@pytest.mark.parametrize("limit", [1, 2, 3, 8])
@pytest.mark.parametrize("f", [product, lambda x, w: (x + 1).sin() * w.exp()])
def test_other_signatures_in_between(f, limit):
    def run(f):
        x, w, *_ = inputs()
        y = checkpoint(f, x, w, use_reentrant=False)
        for dims in range(1, 5):
            f(torch.rand([2] * dims, requires_grad=True), torch.rand([2] * dims))
        return torch.autograd.grad(y.sum(), (x, w))
    same(run(vitrify.compile(f, options={"recompile_limit": limit})), run(f))


@pytest.mark.eager("it writes Python state", "ran eagerly the first time")
def test_the_first_calls_run_eagerly():
    """They fill a cache; what is called again would be compiled by then."""
    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = {}
            self.linear = nn.Linear(3, 3, dtype=torch.float64)

        def forward(self, x, w):
            if len(x) not in self.table:
                self.table[len(x)] = len(x) / 2
            return (self.linear(x * w).sin() * self.table[len(x)]).tanh() * x

    def run(of):
        torch.manual_seed(3)
        m, grads = Caches(), []
        f = of(m)
        for _ in range(4):
            x, w, *_ = inputs()
            grads += torch.autograd.grad(checkpoint(f, x, w, use_reentrant=False).sum(), (x, w, m.linear.weight))
        return grads
    same(run(vitrify.compile), run(lambda m: m))


def test_several_programs_of_one_checkpoint():
    def run(of):
        f, g = of(product), of(attention)
        x, w, *_ = inputs()
        y = checkpoint(lambda a, b: g(f(a, b), f(b, a)) * f(a, a), x, w, use_reentrant=False)
        first = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
        return first + torch.autograd.grad(y.sum(), (x, w))
    same(run(vitrify.compile), run(lambda f: f))


def test_something_else_is_saved_the_second_time():
    """A program that goes another way by then: eager's checkpoint compares numbers and shapes alone; ours tells."""
    turn = [0]

    def f(x, w, other):
        return (x * w).sin() * w.exp() if not other else w.exp() * (x * w).sin()
    compiled = vitrify.compile(f)

    def goes_another_way(x, w):
        turn[0] += 1
        return compiled(x, w, turn[0] > 1)
    x, w, *_ = inputs()
    y = checkpoint(goes_another_way, x, w, use_reentrant=False)
    with pytest.raises(RuntimeError, match="saves something else when it is called again"):
        torch.autograd.grad(y.sum(), (x, w))
