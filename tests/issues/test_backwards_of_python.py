"""Backwards written in Python: what they read of Python's state is as it is when they run, and they say what the derivative is, whatever the forward computes."""
import pytest
import torch
import vitrify
from torch import nn
from torch.utils.checkpoint import checkpoint

R = torch.randn
STATE = {"k": 2.0}
SCALE = 2.0


class Holder:
    k = 2.0


class OfDict(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * STATE["k"] * x


class OfGlobal(OfDict):
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * SCALE * x if SCALE < 4 else (g + x) * SCALE


class OfClass(OfDict):
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * Holder.k * x


class OfAttribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.state = STATE
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * ctx.state["k"] * x


def of_cell():
    k = 2.0

    class OfCell(OfDict):
        @staticmethod
        def backward(ctx, g):
            x, = ctx.saved_tensors
            return g * k * x

    def change(to):
        nonlocal k
        k = to
    return OfCell.apply, change


def set_state(to):
    STATE["k"] = to


def set_global(to):
    global SCALE
    SCALE = to


def set_class(to):
    Holder.k = to


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.k = 2.0
        module = self

        class OfModule(OfDict):
            @staticmethod
            def backward(ctx, g):
                x, = ctx.saved_tensors
                return g * module.k * x
        self.function = OfModule

    def forward(self, x):
        return self.function.apply(x)


def of_module():
    m = Module()
    return m, lambda to: setattr(m, "k", to)


def of_checkpoint():
    def part(x):
        return x.sin() * x.exp() * STATE["k"]
    return lambda x: checkpoint(part, x * 2, use_reentrant=False).cos(), set_state


CASES = {
    "dict": lambda: (OfDict.apply, set_state),
    "global": lambda: (OfGlobal.apply, set_global),
    "class": lambda: (OfClass.apply, set_class),
    "attribute of ctx": lambda: (OfAttribute.apply, set_state),
    "cell": of_cell,
    "module": of_module,
    "checkpoint": of_checkpoint,
}


def once(out, x, change):
    change(5.0)
    return torch.autograd.grad(out.sum(), x)


def back_again(out, x, change):
    change(5.0)
    change(2.0)
    return torch.autograd.grad(out.sum(), x)


def at_each(out, x, change):
    grads = []
    for k in (2.0, 5.0, 3.0, 2.0):
        change(k)
        grads += torch.autograd.grad(out.sum(), x, retain_graph=True)
    return grads


def first_derivative(out, x, change):
    change(5.0)
    g, = torch.autograd.grad(out.sum(), x, create_graph=True)
    return g.detach(), torch.autograd.grad(g.square().sum(), x)[0]


def between_derivatives(out, x, change):
    g, = torch.autograd.grad(out.sum(), x, create_graph=True)
    change(5.0)
    return g.detach(), torch.autograd.grad(g.square().sum(), x)[0]


def batched(out, x, change):
    change(5.0)
    return torch.autograd.grad(out, x, torch.eye(out.numel()).view(-1, *out.shape), is_grads_batched=True)


THEN = [once, back_again, at_each, first_derivative, between_derivatives, batched]


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.eager("op by op: what they read is changed", some=True)
def test_state_that_changes_before_the_backward(name, then):
    """The backward was taken with the state of the first call."""
    results = []
    for compiled in (True, False):
        fn, change = CASES[name]()
        change(2.0)
        f = vitrify.compile(fn, fullgraph=True) if compiled else fn
        results.append([])
        for seed in range(2):
            x = R(2, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            out = f(x)
            results[-1].append(then(out, x, change))
            change(2.0)
    torch.testing.assert_close(*results)


class OfContainer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, state):
        ctx.state = state
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.state["k"], None


@pytest.mark.eager("keeps a container that was passed in")
def test_a_container_that_was_passed_in():
    """A compiled call gives the program a copy of it."""
    results = []
    f = vitrify.compile(lambda x, state: OfContainer.apply(x, state))
    for fn in (f, OfContainer.apply):
        x, state = torch.ones(3, requires_grad=True), {"k": 2.0}
        out = fn(x, state)
        state["k"] = 5.0
        results.append(torch.autograd.grad(out.sum(), x))
    torch.testing.assert_close(*results)


def test_containers_that_are_only_read():
    f = vitrify.compile(lambda x, state, rest: sum(rest, x.sin()) * state["k"], fullgraph=True)
    for k in (2.0, 3.0):
        x = torch.ones(3, requires_grad=True)
        f(x, {"k": k}, [x, x]).sum().backward()
        torch.testing.assert_close(x.grad, k * (x.detach().cos() + 2))


# ---- derivatives that no graph has whole


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Square(OfDict):
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * x * x


def batch(f, x):
    out = f(x)
    return torch.autograd.grad(out, x, torch.eye(out.numel()).view(-1, *out.shape), is_grads_batched=True, create_graph=True)[0]


def batch_again(f, x):
    g = batch(f, x)
    return g.detach(), torch.autograd.grad(g.square().sum(), x)[0] if g.requires_grad else None


def jacobian(f, x):
    return torch.autograd.functional.jacobian(f, x, vectorize=True, create_graph=True).detach()


@pytest.mark.parametrize("way", [batch, batch_again, jacobian])
@pytest.mark.parametrize("function", [StraightThrough, Square])
def test_batched_gradients_that_are_differentiable(function, way):
    """They were those of what the forward computes: of round(), of sin()."""
    def fn(x):
        return (function.apply(x) * x).sum(1)
    x = (R(3, 3) * 2).requires_grad_()
    torch.testing.assert_close(way(vitrify.compile(fn, fullgraph=True), x), way(fn, x))


@pytest.mark.parametrize("function", [StraightThrough, Square])
def test_sparse_gradients_that_are_differentiable(function):
    """Where nothing but the forward's own formulas could say it, that is an error, no other number."""
    x = R(3, 3).requires_grad_()
    out = vitrify.compile(lambda x: function.apply(x).sin(), fullgraph=True)(x)
    with pytest.raises(RuntimeError, match="tangents that are no plain tensors"):
        torch.autograd.grad(out, x, torch.eye(3).to_sparse(), create_graph=True)


class Clipped(torch.autograd.Function):
    """Not linear in its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1, 1)


class OneOfTwo(torch.autograd.Function):
    """Raises where it has no gradient of the first result."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x.sin()

    @staticmethod
    def backward(ctx, g, h):
        return g * 2 if h is None else g * 2 + h


def clipped_itself(x, w):
    y = Clipped.apply(x)
    return y, y.sin(), y.exp()


def clipped_behind(x, w):
    y = Clipped.apply(x) * 0.7
    return y, y.sin(), y.exp()


def clipped_through_a_view(x, w):
    y = Clipped.apply(x).view(6, 2)
    return y, y.sin(), y.exp(), y.t()


def one_of_two(x, w):
    y = OneOfTwo.apply(x)[0]
    return y, y.sin(), torch.conv1d(y, w)


@pytest.mark.parametrize("program", [clipped_itself, clipped_behind, clipped_through_a_view, one_of_two])
def test_a_second_derivative_comes_to_it_with_all_gradients_at_once(program):
    def run(f):
        x, w = torch.linspace(-1, 1, 12).view(1, 4, 3).requires_grad_(), torch.ones(2, 4, 3).requires_grad_()
        out = f(x, w)
        first = torch.autograd.grad(out, x, [torch.full_like(o, 0.3) for o in out], create_graph=True)[0]
        return first, torch.autograd.grad(first.pow(2).mul(3).sum(), x)[0]
    for ours, eager in zip(run(vitrify.compile(program)), run(program)):
        torch.testing.assert_close(ours, eager)


def one_of_two_through_a_view(x, w):
    y = OneOfTwo.apply(x)[0]
    return y, y.sin(), torch.conv1d(y.view(1, 12, 1), w.view(2, 12, 1))


def second_through_one_of_two(f, some):
    x, w = torch.linspace(-1, 1, 12).view(1, 4, 3).requires_grad_(), torch.ones(2, 4, 3)  # nothing comes to y from a convolution by fixed weights
    out = some(f(x, w))
    first = torch.autograd.grad(out, x, [torch.full_like(o, 0.3) for o in out], create_graph=True)[0]
    return first, torch.autograd.grad(first.pow(2).mul(3).sum(), x)[0]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [one_of_two, one_of_two_through_a_view])
def test_gradients_that_bring_it_nothing_stop_in_front_of_it(program, dynamic):
    compiled = vitrify.compile(program, dynamic=dynamic)
    for _ in range(2):
        for ours, eager in zip(second_through_one_of_two(compiled, tuple), second_through_one_of_two(program, tuple)):
            torch.testing.assert_close(ours, eager)
    for f in (compiled, program):
        with pytest.raises(TypeError, match="NoneType"):
            second_through_one_of_two(f, lambda out: out[2:])
