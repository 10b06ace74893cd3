"""A backward of the user's that changes what its ctx holds, but not which object that is: another backward of the same call finds it changed."""
import collections

import expects
import pytest
import torch
import vitrify


class Counter:
    def __init__(self):
        self.n = 0


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


def closure():
    held = [1.0, 2.0, 3.0, 4.0]
    return held.pop


def counting(o):
    o.n += 1
    return o.n


def adding(held):
    held.append(1)
    return len(held)


def in_dict(held):
    held["n"] = held.get("n", 0) + 1
    return held["n"]


def in_bytes(held):
    held[0] += 1
    return held[0]


HELD = {  # what is kept, and what a backward takes of it
    "a stack": (lambda: [1.0, 2.0, 3.0, 4.0], list.pop), "a list that grows": (list, adding), "a dict": (dict, in_dict), "a set": (lambda: {1, 2, 3, 4}, set.pop),
    "a deque": (lambda: collections.deque([1.0, 2.0, 3.0, 4.0]), lambda d: d.popleft()), "within a tuple": (lambda: ([1.0, 2.0, 3.0, 4.0],), lambda t: t[0].pop()),
    "an object": (Counter, counting), "an object with slots": (Slotted, counting), "an iterator": (lambda: iter([1.0, 2.0, 3.0, 4.0]), next),
    "bytes": (lambda: bytearray([1, 2]), in_bytes), "a function": (closure, lambda f: f()), "a generator": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(4, 4, generator=g)),
    "tensors": (lambda: [torch.ones(4, 4) * k for k in range(1, 5)], list.pop), "a tensor": (lambda: torch.zeros(4, 4), lambda t: t.add_(1)),
}
BY_WHAT_IT_CALLS = {"a stack", "a set", "a function", "a generator", "tensors", "a tensor"}  # no code of the user's says what is changed


def function(make, take):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.held = make()
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * take(ctx.held) * ctx.saved_tensors[0]
    return Own


def tensors(made):
    return [t.detach() for t in made if t is not None]


def three_times(ys, x, w):
    for _ in range(3):
        yield lambda: torch.autograd.grad(sum(y.sum() for y in ys), (x, w), retain_graph=True)


def through_each(ys, x, w):
    for y in (*ys, *ys):
        yield lambda: torch.autograd.grad(y.sum(), (x, w), retain_graph=True, allow_unused=True)


def again(ys, x, w):
    first = []
    yield lambda: first.extend(torch.autograd.grad(sum(y.square().sum() for y in ys), (x, w), create_graph=True)) or first
    for _ in range(2):
        yield lambda: torch.autograd.grad(first[0].square().sum(), (x, w), retain_graph=True)


def batched(ys, x, w):
    for _ in range(2):
        yield lambda: torch.autograd.grad(ys[0], x, torch.linspace(-1, 1, 32).view(2, 4, 4), is_grads_batched=True, retain_graph=True)


def outcomes(f, how):
    torch.manual_seed(0)
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    for ask in how(f(x, w), x, w):
        try:
            yield tensors(ask())
        except Exception as e:
            yield f"{type(e).__name__}: {e}".partition("\n")[0]


PROGRAMS = {"one": lambda own, x, w: (own(x * w).sin(),), "two": lambda own, x, w: (own(x * w).sin(), x.exp() * w), "shared": lambda own, x, w: (lambda y: (y.sin(), y * w))(own(x))}
HOW = pytest.mark.parametrize("how", [three_times, through_each, again, batched], ids=lambda f: f.__name__)


@HOW
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("held", HELD)
def test_as_eager(held, name, how):
    expects.eager("writes in a backward" if held == "a tensor" else "changes attributes of its ctx" if held in BY_WHAT_IT_CALLS else "which may be captured after the call")
    own = function(*HELD[held])
    f = lambda x, w: PROGRAMS[name](own.apply, x, w)  # noqa: E731
    compiled = vitrify.compile(f)
    for _ in range(2):
        for ours, eager in zip(outcomes(compiled, how), outcomes(f, how), strict=True):
            assert ours == eager if isinstance(eager, str) else torch.testing.assert_close(ours, eager) is None


KEPT = {"a list": lambda: [2.0, {"a": 3.0}], "an object": Counter, "a tensor": lambda: torch.ones(4, 4), "numbers": lambda: (1, 2.5, "a", None), "a function": closure}


@HOW
@pytest.mark.parametrize("held", KEPT)
def test_what_stays_is_compiled(held, how):
    own = function(KEPT[held], lambda held: 2.0)
    f = lambda x, w: PROGRAMS["two"](own.apply, x, w)  # noqa: E731
    compiled = vitrify.compile(f, fullgraph=True)
    for _ in range(2):
        for ours, eager in zip(outcomes(compiled, how), outcomes(f, how), strict=True):
            torch.testing.assert_close(ours, eager)


def nested(kind, depth):
    held = kind()
    for _ in range(depth):
        held = {"n": held} if kind is dict else [held]
    return held


@pytest.mark.eager("changes attributes of its ctx", some=True)
@pytest.mark.parametrize("depth", [30, 400, 3000])
@pytest.mark.parametrize("kind", [list, dict])
def test_what_is_nested_deeply(kind, depth):
    held, grads = nested(kind, depth), []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.held = held
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3
    for f in (vitrify.compile(lambda x: Own.apply(x)), Own.apply):
        x = torch.ones(2, requires_grad=True)
        f(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


class Closed:
    @property
    def __dict__(self):
        raise ValueError("closed")


@pytest.mark.eager("cannot be read (ValueError)")
def test_what_does_not_let_itself_be_looked_at():
    held, grads = Closed(), []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.held = held
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3
    for f in (vitrify.compile(lambda x: Own.apply(x)), Own.apply):
        x = torch.ones(2, requires_grad=True)
        f(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
