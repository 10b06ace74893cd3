"""Modes, random state, generators, attributes of tensors: what a program reads or leaves in the process, where a capture once lost it."""
import random
import warnings

import bounds
import pytest
import torch
import torch.nn.functional as F
import vitrify
from beside import MODES, check, steps
from torch import nn


@pytest.fixture
def delta():
    """What a counter moved by."""
    before = dict(vitrify.counters)
    return lambda what: vitrify.counters[what] - before[what]


GEN = torch.Generator()
W, BUFFER = torch.arange(1.0, 4), torch.zeros(3)
PARAMETER = nn.Parameter(torch.ones(3), requires_grad=False)


class Sub(torch.Tensor):
    pass


class Passing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, f, types, args=(), kwargs=None):
        return f(*args, **(kwargs or {}))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def fork(x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        a = torch.rand(3)
    return x + a + torch.rand(3)


def again(x):
    state = torch.get_rng_state()
    a = torch.rand(3)
    torch.set_rng_state(state)
    return x + a + torch.rand(3)


def own_generator(x):
    return x + torch.rand(3, generator=torch.Generator().manual_seed(3))


def seeds_reachable(x):
    GEN.manual_seed(3)
    return x + torch.rand(3, generator=GEN)


def draws(x):
    return (x + torch.rand(2, 3), torch.randn(2, 3), torch.randint(5, (3,)), torch.bernoulli(x / 10), F.dropout(x, 0.5), torch.randperm(4), torch.empty(3).uniform_(),
            torch.empty(3).normal_(), torch.rand_like(x), torch.multinomial(x, 2), x.clone().exponential_(), torch.rand(3, generator=torch.default_generator))


def draws_nothing(x):
    return F.dropout(x, 0.0), F.dropout(x, 1.0), F.dropout(x[:0], 0.5), x + 1


def grad_modes(x):
    with torch.no_grad():
        y = x * 2
    with torch.enable_grad():
        z = y * 2
    return y, z, torch.is_grad_enabled()


def inference_inside(x):
    with torch.inference_mode():
        y = x * 2
    return y, y.view(-1), x[0]


def ordinary_inside(x):
    with torch.inference_mode(False):
        return torch.ones(2, 3) * 2


def from_inference(x):
    with torch.inference_mode():
        y = x * 2
    return y + 1, y.is_inference()


def both_kinds(x):
    with torch.inference_mode():
        y = x * 2
    return y, x * 3


def autocast_inside(x):
    with torch.autocast("cpu", torch.bfloat16):
        a = x @ x.t()
        with torch.autocast("cpu", enabled=False):
            return a, a.softmax(-1), x @ x.t(), x + 1


def default_dtype_inside(x):
    torch.set_default_dtype(torch.float64)
    try:
        return torch.ones(3), x + 1
    finally:
        torch.set_default_dtype(torch.float32)


def device_inside(x):
    with torch.device("cpu"):
        return x + torch.ones(3), torch.get_default_device().type


def function_mode_inside(x):
    with Passing():
        return x * 2


def inner_gradient(x):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (g,) = torch.autograd.grad((y * y * y).sum(), y)
    return g * 2


def inner_backward(x):
    with torch.enable_grad():
        y = x.clone().requires_grad_()
        (y * y).sum().backward()
        return y.grad * 2


def transforms(x):
    return torch.func.grad(lambda v: (v ** 3).sum())(x), torch.vmap(lambda v: v.sum() * 2)(x), torch.func.jvp(torch.sin, (x,), (x,))


def writes_parameter_data(x):
    PARAMETER.data.add_(x[0] * 0)
    return x * PARAMETER


def loops(x):
    for i in range(x.shape[0]):
        x = x + i
    a, b = x
    return sum(r for r in x), torch.stack(list(map(torch.sin, x))), a * b, x * len(x), {x: 1}[x], x in [x]


def catches(x):
    try:
        return x @ x
    except RuntimeError:
        return x + 1


def leaves_grad_off(x):
    torch.set_grad_enabled(not torch.is_grad_enabled())
    return x * 2


def turns(name, value):
    def f(x):
        getattr(torch, name)(value)
        return x * 2
    return f


def sets_grad(x):
    W.grad = x[0] * 1
    return x * W


def sets_data(x):
    W.data = BUFFER
    return x * W


def registers_hook(x):
    y = torch.ones(3, requires_grad=True)
    y.register_hook(lambda g: g * 2)
    return x + y.detach()


def reads_grad(x):
    return x * 2 if x.grad is None else x * 3


def with_grad():
    x = torch.ones(2, 3, requires_grad=True)
    x.grad = torch.ones(2, 3)
    return [x]


@MODES
@pytest.mark.parametrize("fn", [draws, draws_nothing, grad_modes, inference_inside, ordinary_inside, from_inference, autocast_inside, device_inside, function_mode_inside,
                                writes_parameter_data, loops, catches, Double.apply], ids=lambda f: f.__name__)
def test_process_state_is_as_in_eager(fn, around, grad):
    check(fn, steps((2, 3)), around=around, grad=grad)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("fn", [inner_gradient, inner_backward, transforms, registers_hook], ids=lambda f: f.__name__)
def test_gradients_inside(fn, grad):
    check(fn, steps((2, 3)), grad=grad)


def test_a_gradient_is_read_by_each_call():
    check(reads_grad, with_grad)


@pytest.mark.parametrize("fn, reason, more", [
    (default_dtype_inside, "changes the default dtype", {}), (fork, "sets the state of a random number generator", {}), (again, "sets the state of a random number generator", {}), (own_generator, "a generator that the program makes", {}),
    (seeds_reachable, "sets the state of a random number generator", {}), (both_kinds, "both inference tensors and others", {}),
    (lambda x: (x * 2, torch.ones(3, requires_grad=True)), "a leaf that needs gradients", {"grad": True}), (sets_data, "assigns to the .data", {}),
    (lambda x: x * random.random(), "random generator", {}),
], ids=lambda v: getattr(v, "__name__", None))
def test_state_that_no_replay_repeats(fn, reason, more, monkeypatch):
    monkeypatch.setattr(random, "random", lambda draw=random.random: draw() * 0) if reason == "random generator" else None
    check(fn, **{"make": steps((2, 3)), **more}, reason=reason)
    W.grad, W.data = None, torch.arange(1.0, 4)


@pytest.mark.parametrize("fn, get, put", [
    (turns("set_grad_enabled", False), torch.is_grad_enabled, torch.set_grad_enabled), (turns("set_default_dtype", torch.float64), torch.get_default_dtype, torch.set_default_dtype),
    (turns("set_num_threads", 1), torch.get_num_threads, torch.set_num_threads), (turns("use_deterministic_algorithms", True), torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (leaves_grad_off, torch.is_grad_enabled, torch.set_grad_enabled),
], ids=["grad", "dtype", "threads", "deterministic", "flips grad"])
@pytest.mark.eager("for what comes after it", "changes the default dtype", some=True)
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
def test_modes_left_changed(fn, get, put):
    before, compiled = get(), vitrify.compile(fn)
    try:
        for _ in range(3):
            put(before)
            fn(torch.ones(3))
            eager = get()
            put(before)
            compiled(torch.ones(3))
            assert get() == eager
    finally:
        put(before)


@pytest.mark.eager("it makes gradients that are there from the first call on")
def test_a_gradient_that_is_set_is_set_by_every_call():
    f = vitrify.compile(sets_grad, fullgraph=True)
    with torch.no_grad():
        for k in range(4):
            W.grad = None
            assert (f(torch.full((2, 3), float(k))) == W * k).all() and torch.equal(W.grad, torch.full((3,), float(k)))
    assert vitrify.counters["compiled_calls"] >= 2
    W.grad = None


def test_the_grad_of_an_argument_is_not_forgotten():
    f = vitrify.compile(reads_grad)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", vitrify.VitrifyWarning)
        for x in (torch.ones(2, 3, requires_grad=True), *with_grad(), torch.ones(2, 3, requires_grad=True)):
            assert torch.equal(f(x), reads_grad(x))


def test_a_reachable_generator_is_drawn_from(delta):
    f = vitrify.compile(lambda x: x + torch.rand(3, generator=GEN))
    for call in range(3):
        GEN.manual_seed(call)
        want = torch.zeros(3) + torch.rand(3, generator=GEN), GEN.get_state()
        GEN.manual_seed(call)
        assert torch.equal(f(torch.zeros(3)), want[0]) and torch.equal(GEN.get_state(), want[1])
    assert delta("compiled_calls") == 3 and delta("captures") == 1


def test_autocast_keeps_its_cache_to_itself(delta):
    """A weight first met by a capture must not leave a placeholder in the cache, nor a cached cast become a constant."""
    w = torch.randn(3, 3, requires_grad=True)  # only such leaves are cached
    f = vitrify.compile(lambda x: x @ w)
    with torch.autocast("cpu", torch.bfloat16):
        for first in ("capture", "eager"):
            with torch.no_grad():
                x = torch.randn(4, 3)
                calls = [f, lambda x: x @ w]
                a, b = [g(x) for g in (calls if first == "capture" else calls[::-1])]
                assert a.dtype == b.dtype == torch.bfloat16
                torch.testing.assert_close(a, b, **bounds.AUTOCAST)
            (x @ w).sum().backward()
            with torch.no_grad():
                w.mul_(2)
            torch.clear_autocast_cache()
            f = vitrify.compile(lambda x: x @ w)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(f(x), x.bfloat16() @ w.bfloat16(), **bounds.AUTOCAST)


def test_a_buffer_is_written_in_place_on_each_call(delta):
    f = vitrify.compile(lambda x: x + BUFFER.add_(1))
    BUFFER.zero_()
    before = BUFFER._version
    for i in range(1, 4):
        assert torch.equal(f(torch.zeros(3)), torch.full((3,), float(i)))
    assert BUFFER._version == before + 3 and delta("compiled_calls") == 3


@pytest.mark.eager("it calls torch.compile")
def test_what_torch_compile_made_still_works_afterwards():
    """A frame of Dynamo's that met our mode used to be marked as never to be compiled: torch.cond failed from then on."""
    def f(x):
        return torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))

    x = torch.ones(2)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", vitrify.VitrifyWarning)
        for g in (vitrify.compile(f), f):
            assert torch.equal(g(x), x + 1) and torch.equal(g(-x), -x - 1)


def test_a_user_mode_around_runs_eagerly():
    check(lambda x: x + 1, steps((2, 3)), around=Passing, reason="TorchFunctionMode")
    check(lambda x: x + 1, lambda: [torch.ones(2).as_subclass(Sub)], reason="subclass")


@pytest.mark.eager("changes the default dtype")
def test_every_change_is_put_back_not_only_the_first():
    """A program that changed a tensor kept what else it had changed in the process: the modes were put back only if no tensor was found changed."""
    w = torch.ones(3)

    def f(x):
        w.marked = True
        random.random()
        torch.set_default_dtype(torch.float64)
        return x * w

    compiled, state = vitrify.compile(f), random.getstate()
    eager_state = random.Random()
    eager_state.setstate(state)
    eager_state.random()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", vitrify.VitrifyWarning)
            out = compiled(torch.ones(3))
        assert out.dtype is torch.float32, "the default dtype was put back before the call that runs eagerly"
        assert random.getstate() == eager_state.getstate(), "drawn once, by the call itself"
    finally:
        torch.set_default_dtype(torch.float32)
