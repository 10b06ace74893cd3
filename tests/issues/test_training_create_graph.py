"""Gradients of gradients of programs that write what they have read: the second derivative sees what eager saved, and raises where eager's does."""
import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
import gradients  # noqa: E402
from gradients import check, leaf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")


def twice(out, args):
    """The gradients, and those of a penalty on them."""
    heads = gradients.differentiable(out)
    to = [a for a in args if a.requires_grad]
    grads = torch.autograd.grad(heads, to, gradients.weights(heads), create_graph=True)
    told = [g.detach().clone() for g in grads]
    return [*told, *torch.autograd.grad(sum(g.square().sum() for g in grads), to, allow_unused=True)]


def counts(x, b):
    y = x * b * b
    b.add_(1.0)
    return y.sin()


def written_twice(x, b):
    y = (x * b.exp()).sin()
    b.mul_(2.0)
    z = (x * b.sigmoid()).cos() + y
    b.add_(1.0)
    return z


def written_by_a_view(x, b):
    y = torch.tanh(x @ b.t().exp())
    b[0].zero_()
    return y


def written_with_gradients(x, w):
    y = (x * w).sin()
    x = x.mul_(2)
    return y.sum() + x.sum()


def running(x, scale):
    with torch.no_grad():
        scale.mul_(0.9).add_(x.abs().max(), alpha=0.1)
    return (x / scale).tanh()


READ_AND_WRITTEN = {
    "read, then written": lambda x, b: ((x * b.exp()).sin(), b.add_(1.))[0],
    "read as it is": lambda x, b: (((x + b).sin() * x), b.add_(1.))[0],
    "read, written, read": written_twice,
    "through a view": written_by_a_view,
    "a counter": lambda x, b: ((x ** 2 / (1 + b.mean())).exp(), b.add_(1.))[0],
    "swapped": lambda x, b: ((x * b.flip(0)).exp(), b.copy_(b.flip(0)))[0],
    "softmax": lambda x, b: ((x * b.exp()).softmax(-1).square(), b.zero_())[0],
    "matrix": lambda x, b: (((x @ b.sin()).tanh() @ b.cos()), b.add_(1.))[0],
    "a normalisation": lambda x, b: (F.layer_norm(x, (3,), b[0].exp(), b[1].sin()), b.add_(1.))[0],
    "a mask": lambda x, b: (torch.where(b > 0.9, x.square(), x.sin()), b.sub_(1.))[0],
    "the result is the buffer": lambda x, b: (x * b.exp()).sin() + b.add_(1.),
}


@pytest.mark.parametrize("name", READ_AND_WRITTEN)
def test_what_is_read_and_then_written(name):
    check(READ_AND_WRITTEN[name], lambda: [leaf(3, 3, dtype=torch.float64), leaf(3, 3, seed=2, dtype=torch.float64, grad=False)], then=twice)


def test_a_running_scale():
    check(running, lambda: [leaf(3, 3, dtype=torch.float64), torch.ones((), dtype=torch.float64)], then=twice)


def test_an_input_that_gradients_follow_into_is_written():
    """Its gradient goes where it went before the write."""
    check(lambda x, y: (x.mul_(y), x.sin())[1], lambda: [leaf(2, 3, dtype=torch.float64), leaf(2, 3, seed=2, dtype=torch.float64)], before=lambda x, y: [x * 1, y],
          then=lambda out, args: twice(out, args[1:]))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)
        self.register_buffer("steps", torch.ones(()))

    def forward(self, x):
        h = torch.tanh(self.a(x)) / self.steps.sqrt()
        self.steps.add_(1)
        return self.b(h * h)


def spectral():
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(4, 8)), nn.Tanh(), norm(nn.Linear(8, 1)))


def batch_norm():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


NETWORKS = {"a step counter": Counting, "spectral norm": spectral, "batch norm": batch_norm}


@pytest.mark.parametrize("kind", ["r1", "wgan"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_gradient_penalty(name, kind):
    """r1: of one call, whose loss is added. wgan: of a call of its own, after that of the loss: buffers have changed in between."""
    losses, states = [], []
    for compiled in (False, True):
        torch.manual_seed(1)
        model = NETWORKS[name]().double()
        f = vitrify.compile(model, fullgraph=True) if compiled else model
        opt = torch.optim.SGD(model.parameters(), 0.05)
        for step in range(4):
            x = leaf(6, 4, seed=step, dtype=torch.float64)
            out = f(x)
            other = f(x + 0.5) if kind == "wgan" else out
            (g,) = torch.autograd.grad(other.sum(), x, create_graph=True)
            loss = out.square().mean() + (g.norm(dim=1) - 1).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.detach())
        states.append(list(model.state_dict().values()))
    torch.testing.assert_close(losses[:4], losses[4:])
    torch.testing.assert_close(*states)
    assert vitrify.counters["eager_calls"] == vitrify.counters["fallbacks"] == 0 and vitrify.counters["kernels_launched"] > 0


def changed(which, then, inputs=(0, 1, 2)):
    """Parameters are changed between the call and the gradients, as an optimizer or an averaged model does."""
    def run(out, args):
        first, second = (None, which) if then == "after the first" else (which, None)
        write(args, first)
        grads = torch.autograd.grad(out.sum(), [args[i] for i in inputs], create_graph=True)
        write(args, second)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), [args[i] for i in inputs], allow_unused=True)
    return run


def write(args, which):
    if which is not None:
        with torch.no_grad():
            args[which].mul_(1.5)


@pytest.mark.parametrize("inputs", [(0, 1, 2), (0,), (1,), (2,)], ids=str)
@pytest.mark.parametrize("then", ["before the first", "after the first"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["input", "weight", "bias"])
def test_a_parameter_that_changes_in_between(which, then, inputs):
    """Eager raises where a node on the way has saved it; a bias it has not."""
    if inputs == (2,) and then == "before the first" and which < 2:
        pytest.skip("refused, as in the next test: the product is made again of what changed")
    make = lambda: [leaf(3, 4, dtype=torch.float64), leaf(4, 4, seed=2, dtype=torch.float64), leaf(4, seed=3, dtype=torch.float64)]  # noqa: E731
    check(lambda x, w, b: torch.tanh(x @ w + b) * (x @ w), make, then=changed(which, then, inputs), native="forward")


def test_what_is_made_again_of_what_changed_is_as_it_was():
    """Eager's node on the way to y has kept the product, and does not see that w changes."""
    def then(out, args):
        with torch.no_grad():
            args[1].mul_(2)
        return torch.autograd.grad(out.sum(), args[2])
    check(lambda x, w, y: (x * w).sigmoid() * y, lambda: [leaf(3, 3), leaf(3, 3, seed=2), leaf(3, 3, seed=3)], then=then)


def test_a_result_that_is_changed_and_not_read():
    def then(out, args):
        with torch.no_grad():
            out[0].zero_()
        return torch.autograd.grad(out[1].sum(), args[0], create_graph=True)[0].detach()
    check(lambda x: (x * 2 + 1, x.sin()), lambda: [leaf(3, 3)], then=then, native="forward")


def test_the_final_value_of_a_buffer_is_read():
    """Eager has saved it as the program left it: what writes it later is noticed."""
    def then(out, args):
        with torch.no_grad():
            args[1].add_(1)
        out.sum().backward()
    fn = lambda x, b: (b.add_(1.), x * b)[1]  # noqa: E731
    check(fn, lambda: [leaf(3), leaf(3, seed=2, grad=False)], then=then, native="forward")
    check(fn, lambda: [leaf(3), leaf(3, seed=2, grad=False)], then=twice, native="forward")


def test_third_order_where_something_is_written():
    def then(out, args):
        g, = torch.autograd.grad(out.sum(), args[0], create_graph=True)
        h, = torch.autograd.grad(g.square().sum(), args[0], create_graph=True)
        return [g.detach(), h.detach(), *torch.autograd.grad(h.sum(), args[0])]
    make = lambda: [leaf(3, 3, dtype=torch.float64), leaf(3, 3, seed=2, dtype=torch.float64, grad=False)]  # noqa: E731
    check(READ_AND_WRITTEN["read, then written"], make, then=then)
    check(READ_AND_WRITTEN["matrix"], make, then=then)


class Counts(nn.Module):
    """A buffer that is written, and read since."""

    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("m", buffer)
        self.inner = nn.Linear(32, 32)

    def forward(self, x):
        self.m.add_(1)
        y = x / self.m
        return y, self.inner(y) + y


@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(0, 2)], ids=["first", "second", "both"])
@pytest.mark.parametrize("again", [False, True], ids=["backward", "create_graph"])
@pytest.mark.parametrize("make", [lambda: torch.zeros(()), lambda: torch.zeros(32), lambda: torch.zeros((), dtype=torch.int64)], ids=["number", "row", "integer"])
def test_a_buffer_of_the_module_that_counts(make, again, which):
    results = []
    torch.manual_seed(3)
    net = Counts(make())
    for f in (copy.deepcopy(net), vitrify.compile(net)):
        for _ in range(2):
            x = leaf(4, 32)
            grads = torch.autograd.grad([o.sin().sum() for o in f(x)[which]], x, create_graph=again)
            if again:
                grads += torch.autograd.grad(grads[0].square().sum(), x)
        results.append(grads)
    torch.testing.assert_close(*results)
    assert vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0


@pytest.mark.parametrize("program", [
    lambda x: (x.nonzero(), F.dropout(x.sin(), 0.5)), lambda x: (torch.argwhere(x > 0.6).float() * 2, x.sin()), lambda x: (x[x > 0.6] * 2, x.sin()),
    lambda x: (x.detach()[x > 0.6].exp(), x.sin() * x.detach()[x > 0.6].sum())], ids=["positions", "of positions", "some", "read"])
def test_beside_a_result_of_a_size_that_follows_from_content(program):
    def then(out, args):
        grad, = torch.autograd.grad(out[1].sum(), args, create_graph=True)
        return [grad.detach(), *torch.autograd.grad(grad.square().sum(), args)] if grad.requires_grad else grad
    check(program, lambda: [leaf(4, 5)], then=then)


def test_sizes_from_content_beside():
    """A level of gradients that does not read what has them is given its sizes all the same."""
    def f(x):
        return x.sin(), torch.relu(x[x != 0]) * 2
    results = []
    for call in (f, vitrify.compile(f)):
        x = torch.linspace(-1, 1, 8, dtype=torch.float64).requires_grad_()
        first, = torch.autograd.grad(call(x)[0].sum(), x, create_graph=True)
        results.append((first, *torch.autograd.grad(first.sum(), x)))
    for ours, eager in zip(*reversed(results)):
        torch.testing.assert_close(ours, eager)
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["fallbacks"] == 0


@pytest.mark.parametrize("fn", [lambda x: x * x, lambda x: x.sin(), lambda x: x.tanh() * x, lambda x: x * 2, lambda x: (x.sin(), x.exp() * 2)[1]], ids=["square", "sin", "product", "twice", "one of two"])
@pytest.mark.parametrize("use", ["backward", "again", "second", "third"])
def test_a_result_as_its_own_tangent(fn, use):
    """The tangent leads to the node that it comes to."""
    def run(f):
        x = torch.tensor([0.5, 1.5], requires_grad=True)
        y = f(x)
        if use == "backward":
            y.backward(y)
            return [x.grad]
        if use == "again":
            return [*torch.autograd.grad(y, x, y, retain_graph=True), *torch.autograd.grad(y, x, y)]
        g, = torch.autograd.grad(y, x, y, create_graph=True)
        h, = torch.autograd.grad(g.sum(), x, create_graph=use == "third")
        return [g.detach(), h.detach(), *(torch.autograd.grad(h.sum(), x, allow_unused=True) if use == "third" and h.requires_grad else [])]
    torch.testing.assert_close(run(vitrify.compile(fn, fullgraph=True)), run(fn))


ALIKE = {
    "flip": lambda x, w, b: (x * w).flip(0) + b.flip(0), "slice": lambda x, w, b: (x @ w)[2:] + b[2:], "cumsum": lambda x, w, b: (x * w).cumsum(0) + b.cumsum(0),
    "roll": lambda x, w, b: (x * w).roll(1, 0) + b.roll(1, 0), "gather": lambda x, w, b: (x * w)[[0, 0, 2]] + b[[0, 0, 2]], "pad": lambda x, w, b: F.pad(x * w, (1, 1)) + F.pad(b, (1, 1)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_gradient_that_the_next_derivative_computes_too(name):
    """Users may change the one they have: the other was taken for it, and could not be kept."""
    check(ALIKE[name], lambda: [leaf(4, 4), leaf(4, 4), leaf(4, 4)], then=twice)
    def then(out, args):  # an expanded tangent
        grads = torch.autograd.grad(out.sum(), args, create_graph=True)
        return [*(g.detach().clone() for g in grads), *torch.autograd.grad(sum(g.square().sum() for g in grads), args, allow_unused=True)]
    check(ALIKE[name], lambda: [leaf(4, 4), leaf(4, 4), leaf(4, 4)], then=then)
