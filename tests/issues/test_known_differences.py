"""Where the engine differs from eager and nobody has mended it yet: each test fails today and must (strictly), and goes to the file of its subject with its mend."""
import pytest
import torch
import vitrify
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = [pytest.mark.judged("each is a known difference"), pytest.mark.xfail(strict=True, raises=AssertionError, reason="not mended")]


def outcome(f, program, *makes):
    torch.manual_seed(0)
    try:
        return [program(f, *make()) for make in makes]
    except Exception as e:
        return type(e), str(e).partition("\n")[0]


def check(fn, program, *makes):
    """`program(f, *args)` with `fn` and with `fn` compiled: what it gives, or raises."""
    eager, ours = outcome(fn, program, *makes), outcome(vitrify.compile(fn), program, *makes)
    if isinstance(eager, list) and isinstance(ours, list):
        torch.testing.assert_close(ours, eager, equal_nan=True)
    else:
        assert ours == eager


def called(f, *args):
    with torch.no_grad():
        return f(*args)


# ---- custom ops

lib = torch.library.Library("known_differences", "DEF")
lib.define("inc(Tensor(a!) x) -> ()")
lib.impl("inc", lambda x: (x.add_(1), None)[1], "CPU")
lib.impl("inc", lambda x: None, "Meta")


def test_versions_of_what_a_library_op_writes():
    def versions(f, x):
        called(f, x)
        return x._version
    check(lambda x: (torch.ops.known_differences.inc(x), x + 1)[1], versions, lambda: [torch.ones(3)])


# ---- between forward and backward

def two(x):
    a = x.sin()
    return a, a * x


def test_a_hook_of_one_result_where_gradients_of_gradients_come_through_another():
    def program(f, x):
        a, b = f(x)
        a.register_hook(lambda g: g * 10)
        first, = torch.autograd.grad(b.sum(), x, create_graph=True)
        first.square().sum().backward()
        return x.grad
    check(two, program, lambda: [torch.randn(4, requires_grad=True)])


# ---- gradients, of the first and second order

class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * torch.rand_like(g)


def leaf(*sizes):
    return torch.ones(sizes, requires_grad=True)


def second_with_draws(f, x):
    g, = torch.autograd.grad(f(x).sin().sum(), x, create_graph=True)
    return torch.autograd.grad(g.sin().sum(), x)


@pytest.mark.parametrize("fn, program, makes", [
    (lambda x: checkpoint(lambda t: torch.dropout(t.sin(), 0.5, True).exp(), Noise.apply(x), use_reentrant=False), second_with_draws, [lambda: [leaf(50)]]),
], ids=["draws behind a checkpoint"])
def test_gradients(fn, program, makes):
    check(fn, program, *makes)


def test_data_assigned_to_a_result_that_another_result_has_saved():
    def program(f, x):
        a, b = f(x)
        a.data = torch.full_like(a, 7.0)
        b.sum().backward()
        return x.grad
    check(lambda x: (lambda a: (a, a * a))(x.exp()), program, lambda: [leaf(3)])


def test_what_hooks_give_back_is_another_thing_and_is_differentiated_again():
    def program(f, x, w):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t[:2]):
            y = f(x, w)
        return torch.autograd.grad(y.sum(), [x, w], create_graph=True)
    check(lambda x, w: x * w * 2, program, lambda: [leaf(4, 3), leaf(4, 3)])


def test_an_inference_tensor_that_needs_gradients():
    def program(f):
        with torch.inference_mode():
            x = torch.ones(6).requires_grad_()
        return torch.autograd.grad(f(x).sum(), x)
    check(lambda x: x.clone(), program, lambda: [])
