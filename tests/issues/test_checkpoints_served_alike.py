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
    compiled, before = vitrify.compile(f), vitrify.counters["kernels_launched"]
    for _ in range(2):
        same(run(compiled), run(f))
    assert vitrify.counters["kernels_launched"] > before or where != "backward"  # only a mode around the forward keeps that from being compiled


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


class Caches(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = {}
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x, w):
        if len(x) not in self.table:
            self.table[len(x)] = len(x) / 2
        return (self.linear(x * w).sin() * self.table[len(x)]).tanh() * x


@pytest.mark.eager("it writes Python state", "ran eagerly the first time")
def test_each_backward_counts_its_own_calls():
    """The first call ran eagerly, and so do those of three backwards."""
    def run(of):
        torch.manual_seed(3)
        f, grads = of(Caches()), []
        x, w, *_ = inputs()
        y = checkpoint(f, x, w, use_reentrant=False)
        for _ in range(3):
            f(x, w)
        for _ in range(3):
            grads += torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
        return grads
    same(run(vitrify.compile), run(lambda m: m))


@pytest.mark.eager("it writes Python state", "ran eagerly the first time")
def test_the_first_calls_run_eagerly():
    """They fill a cache; what is called again would be compiled by then."""
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


def add(x, w):
    return x + w  # saves nothing


def multiply(x, w):
    return x * w


def other_order(add, multiply, x, w, made):
    made.append(0)
    if len(made) == 1:
        first = add(x, w)
        second = multiply(x, w)
    else:
        second = multiply(x, w)
        first = add(x, w)
    return first.sin() * second.cos()


def used_up(add, multiply, x, w, made):
    if not made:
        made += [add(w, x), 0]
    ready = made.pop() if len(made) > 1 else None
    return multiply(x, made[0] if ready is not None else add(w, x)).sin()


def used_up_alone(add, multiply, x, w, made):
    if not made:
        made += [add(w, x), 0]
    ready = made.pop() if len(made) > 1 else None
    return multiply(x, made[0] if ready is not None else add(w, x))


def cached(add, multiply, x, w, made):
    if not made:
        made.append(add(w, x))
    return multiply(x, made[0]).sin()


def only_the_first_time(add, multiply, x, w, made):
    made.append(0)
    if len(made) == 1:
        add(x, w)
    return multiply(x, w).sin() * multiply(w, x)


def only_again(add, multiply, x, w, made):
    made.append(0)
    if len(made) > 1:
        add(w, x)
    return multiply(x, w).sin() * multiply(w, x)


def more_again(add, multiply, x, w, made):
    made.append(0)
    r = multiply(x, w).sin()
    return add(r, r if len(made) == 1 else add(add(x, w), r) - add(x, w))


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("block", [other_order, used_up, used_up_alone, cached, only_the_first_time, only_again, more_again])
def test_other_calls_the_second_time(block, backwards):
    """Of programs that save nothing there may be more, or fewer, or in another order: eager does not notice."""
    def run(of):
        a, m, made = of(add), of(multiply), []
        x, w, *_ = inputs()
        for _ in range(2):
            a(x, w), m(x, w)
        h, g = x * 1, w * 1
        y = checkpoint(lambda x, w: block(a, m, x, w, made), h, g, use_reentrant=False)
        found = []
        for k in range(backwards):
            found += torch.autograd.grad(y.sum() * (k + 1), (x, w), retain_graph=True)
        return found
    same(run(vitrify.compile), run(lambda f: f))


def written(x, w):
    x.mul_(w)
    return x.sin()


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

    def forward(self, x, w):
        y = (x * w * self.scale).sin() * x
        self.count.add_(1)
        self.scale.mul_(1.5)
        return y


@pytest.mark.eager("op by op: a mode sees", "hooks take what it saves before it has written", "ran eagerly the first time", some=True)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", [torch.autograd.detect_anomaly, Mode, lambda: FlopCounterMode(display=False)], ids=["anomaly", "mode", "flops"])
@pytest.mark.parametrize("what", ["argument", "buffers", "batch norm", "dropout"])
def test_what_writes_with_a_mode_around_the_backward(what, mode):
    def run(of):
        torch.manual_seed(1)
        m = Counts() if what == "buffers" else nn.BatchNorm1d(3, dtype=torch.float64)
        f = of({"argument": written, "buffers": m, "batch norm": lambda x, w: (m(x) * w).sin(), "dropout": lambda x, w: nn.functional.dropout(x * w, 0.5).sin() * w}[what])
        x, w, *_ = inputs()
        found = []
        for _ in range(2):
            y = checkpoint(lambda a, b: f(a.clone(), b), x, w, use_reentrant=False)
            with mode():
                y.sum().backward()
            found += [x.grad.clone(), w.grad.clone(), *(b.double() for b in m.buffers())]
        return found
    if what == "batch norm" and mode not in (torch.autograd.detect_anomaly, Mode):
        pytest.skip("FlopCounterMode has hooks on all modules in the backward alone, which the second call would have to run")
    same(run(vitrify.compile), run(lambda f: f))


BETWEEN = {
    "a gradient": lambda x, w: (w * 2).sum().backward(), "no gradient any more": lambda x, w: (setattr(x, "grad", None), setattr(w, "grad", None)),
    "a gradient assigned": lambda x, w: setattr(w, "grad", torch.zeros(3, 3, dtype=torch.float64)), "an attribute": lambda x, w: setattr(w, "tag", 1),
    "threads": lambda x, w: torch.set_num_threads(1), "deterministic": lambda x, w: torch.use_deterministic_algorithms(True),
    "precision": lambda x, w: torch.set_float32_matmul_precision("medium"), "default dtype": lambda x, w: torch.set_default_dtype(torch.float64),
}


@pytest.fixture
def settings():
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("settings")
@pytest.mark.eager("recompile_limit", "ran eagerly the first time", some=True)
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("around", [contextlib.nullcontext, torch.autograd.detect_anomaly], ids=["nothing", "anomaly"])
@pytest.mark.parametrize("limit", [1, 8])
@pytest.mark.parametrize("between", BETWEEN)
def test_what_the_second_call_finds_otherwise(between, limit, around):
    """Gradients that came meanwhile, attributes and settings are no reason to serve it otherwise."""
    def run(of):
        x, w, *_ = inputs()
        f, found = of(product), []
        for _ in range(3):
            y = checkpoint(f, x, w, use_reentrant=False)
            BETWEEN[between](x, w)
            with around():
                y.sum().backward()
            found += [x.grad.clone(), w.grad.clone()]
        return found
    same(run(lambda f: vitrify.compile(f, options={"recompile_limit": limit})), run(lambda f: f))


def convolutions(x, w):
    w = w.float().view(9, 3, 3, 3)
    y = nn.functional.conv2d(nn.functional.conv2d(x.float(), w[:3], padding=1).relu(), w[3:6], padding=1).sigmoid()
    return (nn.functional.max_pool2d(y, 2) * y.mean()).sum()


@pytest.mark.parametrize("both", [False, True])
def test_another_size_in_between(both):
    """The plan for sizes that change from call to call saved another number of tensors than the first one."""
    def run(f):
        torch.manual_seed(0)
        w = torch.randn(9, 27, dtype=torch.float64).requires_grad_()
        x = [torch.rand(n, 3, 12, 12, dtype=torch.float64, requires_grad=True) for n in (4, 5)]
        first = checkpoint(lambda a: f(a, w), x[0], use_reentrant=False)
        second = checkpoint(lambda a: f(a, w), x[1], use_reentrant=False) if both else f(x[1], w)
        second.backward()
        first.backward()
        return [x[0].grad, x[1].grad, w.grad]
    for ours, eager in zip(run(vitrify.compile(convolutions)), run(convolutions), strict=True):
        torch.testing.assert_close(ours, eager, **bounds.DEEP_CONVOLUTIONS)


NUMBER = [2.0]


@pytest.mark.parametrize("f, number, other", [
    (lambda x, w: ((x * NUMBER[0]) @ w * NUMBER[0]).sin(), 2.0, 3.0), (lambda x, w: ((x @ w) + NUMBER[0]).sin(), 2.0, 3.0),
    (lambda x, w: (x @ w).softmax(int(NUMBER[0])).sin(), 1.0, 0.0), (lambda x, w: (x @ w)[:, int(NUMBER[0]):int(NUMBER[0]) + 2].exp().sin(), 0.0, 1.0),
    (lambda x, w: ((x @ w).exp() * torch.tensor([NUMBER[0], 1.0, 2.0])).sin(), 2.0, 3.0)], ids=["product", "sum", "dim", "part", "literal"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_another_number_the_second_time(f, number, other, dynamic):
    """Eager mixes what it saved then with what it saves now; ours gives the gradient of what was computed, or tells."""
    def run(f, other=other):
        NUMBER[0] = number
        x, w, *_ = inputs()
        y = checkpoint(f, x, w, use_reentrant=False)
        NUMBER[0] = other
        return torch.autograd.grad(y.sum(), (x, w))
    try:
        ours = run(vitrify.compile(f, dynamic=dynamic))
    except RuntimeError as e:
        assert "saves something else when it is called again" in str(e)
    else:
        same(ours, run(f, number))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("f", PROGRAMS)
def test_gradients_of_gradients(f, dynamic):
    """The function is called again while a derivative is taken of the call."""
    def run(f):
        x, w, *_ = inputs()
        y = checkpoint(f, x, w, use_reentrant=False)
        first = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))]
    compiled = vitrify.compile(f, dynamic=dynamic)
    for _ in range(2):
        for ours, eager in zip(run(compiled), run(f), strict=True):
            torch.testing.assert_close(ours, eager, **bounds.DEEP)
