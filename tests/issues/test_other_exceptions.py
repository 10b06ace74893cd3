"""What a program raises need be no Exception: what it has done by then stays done, and what it was told by is what is there. What a handler of signals raises is not the program's."""
import functools
import signal

import expects
import pytest
import torch
import vitrify


class Stop(BaseException):
    pass


def outcome(f, x):
    torch.manual_seed(0)
    try:
        return f(x)
    except BaseException as e:  # noqa: B036
        return type(e), e.args, x.clone(), x._version, torch.rand(1)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b)) if isinstance(a, tuple) else a == b


def by_rows(x):
    v = x[x > 0]
    if v.shape[0] > 1:
        raise Stop(v.shape[0])
    return v * 2


def after_a_write(x):
    x.add_(1)
    torch.rand(2)
    raise Stop(x * 2)


def ends(x):
    x.mul_(2)
    raise SystemExit(3)


def caught(x):
    try:
        raise Stop(x * 2)
    except Stop as e:
        return e.args[0] + 1


@pytest.mark.no_kernels("the program raises", some=True)
@pytest.mark.eager("a size that follows from content is not what the plan is for", some=True)
@pytest.mark.parametrize("f", [by_rows, after_a_write, ends, caught], ids=lambda f: f.__name__)
def test_as_eager(f):
    compiled = vitrify.compile(f)
    for numbers in ([1.0, -1.0, -1.0], [-1.0, -1.0, -1.0], [1.0, 1.0, -1.0], [3.0, -1.0, -1.0]):
        assert same(outcome(compiled, torch.tensor(numbers)), outcome(f, torch.tensor(numbers)))


class Late(Exception):
    pass


class Handler:
    def __call__(self, *_):
        raise Late

    def method(self, *_):
        raise Late


def raises(*_):
    raise Late


@pytest.mark.parametrize("handler", [raises, Handler(), Handler().method, functools.partial(raises, 1)], ids=["function", "object", "method", "partial"])
def test_of_a_handler(handler):
    """Such as a time limit: eager would not raise it again."""
    expects.no_kernels("the first call ends as it is captured")
    at = []

    def f(x):
        if not at:
            at.append(signal.raise_signal(signal.SIGUSR1))
        return x * 2

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Late):
            vitrify.compile(f)(torch.ones(3))
    finally:
        signal.signal(signal.SIGUSR1, before)
