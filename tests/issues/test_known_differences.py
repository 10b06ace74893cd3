"""Where the engine differs from eager and nobody has mended it yet: each test fails today and must (strictly), and goes to the file of its subject with its mend."""
import pytest
import torch
import vitrify
from torch import nn

pytestmark = [pytest.mark.judged("each is a known difference"), pytest.mark.xfail(strict=True, raises=AssertionError, reason="not mended")]
A, R = torch.arange, torch.randn


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




@pytest.mark.parametrize("fn", [lambda x: x.cumprod(1), lambda x: x.prod(1)], ids=["cumprod", "prod"])
def test_second_derivatives_of_products_at_infinity(fn):
    def program(f, x):
        x[0, 1], x[0, 2] = float("inf"), 0.0
        x.requires_grad_()
        g, = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        g.sum().backward()
        return x.grad
    check(fn, program, lambda: [A(1.0, 9.0).view(2, 4).clone()])


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_weights_swapped(grad):
    m = nn.Linear(4, 4)

    def program(f, x):
        with torch.set_grad_enabled(grad):
            f(x)
            torch.utils.swap_tensors(m.weight, nn.Parameter(torch.ones(4, 4)))
            return f(x).detach()
    check(m, program, lambda: [torch.ones(2, 4)])
