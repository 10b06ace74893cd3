"""What Python does besides tensors, in derivatives of the user's and in custom ops: as often, and when, eager does it."""
import warnings

import expects
import pytest
import torch
import vitrify
from torch.autograd import Function

LOG, STATE, COUNTS = [], {"n": 0}, [0]
NUMBER = 0


class Counter:
    n = 0


class Doubles(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2


class Appends(Doubles):
    @staticmethod
    def backward(ctx, g):
        LOG.append(1)
        return g * 2


class Counts(Doubles):
    @staticmethod
    def backward(ctx, g):
        STATE["n"] += 1
        return g * STATE["n"]


class CountsInAList(Doubles):
    @staticmethod
    def backward(ctx, g):
        COUNTS[0] += 1
        return g * COUNTS[0]


class CountsInAClass(Doubles):
    @staticmethod
    def backward(ctx, g):
        Counter.n += 1
        return g * Counter.n


class CountsInAGlobal(Doubles):
    @staticmethod
    def backward(ctx, g):
        global NUMBER
        NUMBER += 1
        return g * NUMBER


class Keeps(Doubles):
    @staticmethod
    def backward(ctx, g):
        LOG.append(g.sum())
        return g * 2


class Remembers(Doubles):
    """Two backwards of one call differ."""

    @staticmethod
    def backward(ctx, g):
        ctx.times = getattr(ctx, "times", 0) + 1
        return g * ctx.times


class InTheForward(Function):
    @staticmethod
    def forward(ctx, x):
        Counter.n += 1
        return x * Counter.n

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Reads(Doubles):
    @staticmethod
    def backward(ctx, g):
        return g * STATE["n"]


def reset():
    global NUMBER
    NUMBER = STATE["n"] = COUNTS[0] = Counter.n = 0
    LOG.clear()


def seen():
    return [NUMBER, STATE["n"], COUNTS[0], Counter.n, [x if isinstance(x, int) else float(x) for x in LOG]]


def both(fn, then=lambda y: y.sum().backward(), between=lambda k: None):
    told = []
    for compiled in (False, True):
        reset()
        f, log = vitrify.compile(fn) if compiled else fn, []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for k in range(5):
                between(k)
                x = torch.linspace(1, 2, 3, requires_grad=True)
                y = f(x)
                log.append([y.tolist(), seen()])
                then(y)
                log.append([x.grad.tolist(), seen()])
        told.append(log)
    reset()
    assert told[0] == told[1]


@pytest.mark.parametrize("inner", [False, True], ids=["alone", "within"])
@pytest.mark.parametrize("function", [Appends, Counts, CountsInAList, CountsInAClass, CountsInAGlobal, Keeps, InTheForward], ids=lambda f: f.__name__)
def test_in_a_derivative(function, inner):
    if function is InTheForward:
        expects.eager("it writes Python state, as caches do at first: ", "it writes Python state on every call: ")
    else:
        expects.eager("which may be captured after the call")
    both((lambda x: function.apply(x.neg()).neg()) if inner else (lambda x: function.apply(x)))


@pytest.mark.eager("Remembers changes an attribute (times) in its backward")
def test_on_the_context():
    def twice(y):
        y.sum().backward(retain_graph=True)
        y.sum().backward()
    both(lambda x: Remembers.apply(x) + 0, twice)


def test_what_a_derivative_reads_may_change():
    def between(k):
        STATE["n"] = k // 2
    both(lambda x: Reads.apply(x) + 1, between=between)
    assert vitrify.counters["compiled_calls"] > 0 and vitrify.counters["kernels_launched"] > 0


# ---- custom ops without tensors

@pytest.fixture(scope="module")
def ops():
    @torch.library.custom_op("vitrify_effects::note", mutates_args=())
    def note(n: int) -> None:
        LOG.append(n)

    @torch.library.custom_op("vitrify_effects::number", mutates_args=())
    def number() -> int:
        LOG.append(7)
        return len(LOG)

    @torch.library.custom_op("vitrify_effects::of_a_tensor", mutates_args=())
    def of_a_tensor(x: torch.Tensor) -> int:
        LOG.append(9)
        return len(LOG)

    @torch.library.custom_op("vitrify_effects::make", mutates_args=())
    def make(n: int) -> torch.Tensor:
        LOG.append(n)
        return torch.full((n,), float(len(LOG)))
    note.register_fake(lambda n: None)
    number.register_fake(lambda: 1)
    of_a_tensor.register_fake(lambda x: 1)
    make.register_fake(lambda n: torch.empty(n))
    library = torch.library.Library("vitrify_effects2", "DEF")
    library.define("say(int n) -> ()")
    library.impl("say", LOG.append, "CompositeExplicitAutograd")
    library.define("count(int n) -> int")
    library.impl("count", lambda n: (LOG.append(n), len(LOG))[1], "CompositeExplicitAutograd")
    library.define("composite(int n) -> int")
    library.impl("composite", lambda n: (LOG.append(n), len(LOG))[1], "CompositeImplicitAutograd")
    library.define("select(int n) -> ()")
    library.impl("select", LOG.append, "BackendSelect")
    yield torch.ops.vitrify_effects, torch.ops.vitrify_effects2
    library._destroy()


PROGRAMS = {  # and whether it is compiled
    "nothing comes back": (lambda a, b, x: (a.note(3), x * 2)[1], True), "a number": (lambda a, b, x: x * a.number(), False), "a number that nobody reads": (lambda a, b, x: (a.number(), x * 2)[1], False),
    "a tensor": (lambda a, b, x: x * a.make(3), True), "a tensor that nobody reads": (lambda a, b, x: (a.make(3), x * 3)[1], True), "twice": (lambda a, b, x: (a.note(1), a.note(2), x * 2)[2], True),
    "for all backends": (lambda a, b, x: (b.say(4), x * 2)[1], True), "a number for all backends": (lambda a, b, x: x * b.count(2), False), "composite": (lambda a, b, x: x * b.composite(2), False), "a selected backend": (lambda a, b, x: (b.select(5), x * 2)[1], True),
    "a number of a tensor": (lambda a, b, x: x * a.of_a_tensor(x.detach()), False),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_custom_op_without_tensors(ops, name):
    program, compiled = PROGRAMS[name]
    if not compiled:
        expects.eager("whose result is no tensor" if name != "composite" else "of which nothing is known but that it has no tensor for a result")
    both(lambda x: program(*ops, x))
    assert (vitrify.counters["eager_calls"] == 0) == compiled and (vitrify.counters["kernels_launched"] > 0) == compiled


@pytest.mark.parametrize("of", ["note", "say"])
def test_in_the_backward(ops, of):
    """It runs with the backward, not with the forward; also where gradients come through some of the results."""
    call = ops[0].note if of == "note" else ops[1].say

    class Says(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            call(8)
            return g * 2
    both(lambda x: Says.apply(x.neg()))
    assert vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0
    told = []
    for compiled in (False, True):
        reset()

        def fn(x):
            return Says.apply(x.sin()), x.cos()
        f = vitrify.compile(fn) if compiled else fn
        for which in ((0,), (1,), (0, 1)):
            x = torch.linspace(1, 2, 3, requires_grad=True)
            out = f(x)
            torch.autograd.grad(sum(out[i].sum() for i in which), x)
            told.append(seen())
    assert told[:3] == told[3:]
    reset()
