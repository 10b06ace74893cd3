"""Ctrl-C while a program's own Python code runs within a compiled call, its capture or the look at its arguments: it is raised, and not lost."""
import contextlib
import os
import signal

import pytest
import torch

import vitrify


# What asks for an interrupt is a byte in a pipe: Python state that a program changes would be put back after a capture.
asked, ask = os.pipe()
os.set_blocking(asked, False)


def taken():
    try:
        return bool(os.read(asked, 1))
    except BlockingIOError:
        return False


def interrupt():
    """Interrupts as Ctrl-C does where a test has asked for it."""
    if taken():
        signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def interrupted():
    os.write(ask, b"x")
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        left = taken()
    assert not left


@torch.library.custom_op("interrupts_kept::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    interrupt()
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("interrupts_kept::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@thrice.register_fake
def _(x):
    interrupt()
    return torch.empty_like(x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        interrupt()
        return 2 * g * ctx.saved_tensors[0]


def test_in_a_custom_op_that_runs():
    x = torch.randn(64)
    f = vitrify.compile(lambda x: twice(x.sin()) + 1)
    torch.testing.assert_close(f(x), x.sin() * 2 + 1)
    for _ in range(3):
        with interrupted():
            f(x)
        ran = vitrify.counters["compiled_calls"]
        torch.testing.assert_close(f(x), x.sin() * 2 + 1)
        assert vitrify.counters["compiled_calls"] == ran + 1


def test_what_an_interrupted_call_writes_is_written_once():
    x = torch.randn(64)
    before = x.clone()

    def f(x):
        x.add_(1)
        return twice(x.sin()) + 1

    compiled = vitrify.compile(f)
    compiled(x)
    with interrupted():
        compiled(x)
    assert torch.equal(x, before + 1) or torch.equal(x, before + 1 + 1)  # eager has made them; a compiled call had not begun
    x.copy_(before)
    torch.testing.assert_close(compiled(x), f(before.clone()))


def test_in_a_fake_implementation():
    x = torch.randn(64)
    f = vitrify.compile(lambda x: thrice(x.sin()) + 1)
    with interrupted():
        f(x)
    captured = vitrify.counters["captures"]
    torch.testing.assert_close(f(x), x.sin() * 3 + 1)
    assert vitrify.counters["captures"] == captured + 1


def test_in_a_backward_written_in_python():
    x = torch.randn(64, requires_grad=True)
    f = vitrify.compile(lambda x: Square.apply(x.sin()).sum())
    with interrupted():  # while it is captured
        f(x).backward()
    x.grad = None
    f(x).backward()
    want, = torch.autograd.grad((x.sin() ** 2).sum(), x)
    torch.testing.assert_close(x.grad, want)


class Setting:
    def __init__(self, n):
        self.n = n

    def __eq__(self, other):
        interrupt()
        return isinstance(other, Setting) and self.n == other.n

    def __hash__(self):
        return hash(self.n)


class Pair:
    def __init__(self, a, b, setting=None):
        self.a, self.b, self.setting = a, b, setting


def _flatten(p):
    if p.setting is None:
        interrupt()
    return [p.a, p.b], p.setting


torch.utils._pytree.register_pytree_node(Pair, _flatten, lambda children, setting: Pair(*children, setting))


def test_in_the_flattening_of_an_argument():
    x, y = torch.randn(64), torch.randn(64)
    f = vitrify.compile(lambda p: p.a.sin() * p.b)
    f(Pair(x, y))
    with interrupted():
        f(Pair(x, y))
    captured = vitrify.counters["captures"]
    torch.testing.assert_close(f(Pair(x, y)), x.sin() * y)
    assert vitrify.counters["captures"] == captured


def test_in_the_comparison_of_what_an_argument_holds():
    x, y = torch.randn(64), torch.randn(64)
    f = vitrify.compile(lambda p: p.a.sin() * p.b)
    f(Pair(x, y, Setting(2)))
    with interrupted():
        f(Pair(x, y, Setting(2)))
    captured = vitrify.counters["captures"]
    torch.testing.assert_close(f(Pair(x, y, Setting(2))), x.sin() * y)
    assert vitrify.counters["captures"] == captured
