"""Derivatives that users write, and activations computed again: autograd.Function, custom ops, torch.utils.checkpoint."""
import functools
import warnings

import gradients
import pytest
import torch
import torch.nn.functional as F
import vitrify
from gradients import check, exact, leaf, leaves
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

TWO = leaves((2, 3), (2, 3))


class Triple(Function):  # not the true derivative: what is written here must be what runs
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * 3 * x


class Scaled(Function):
    @staticmethod
    def forward(ctx, x, w, factor, text):
        ctx.factor = factor
        ctx.save_for_backward(x, w)
        return x * w * factor

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        need = ctx.needs_input_grad
        assert need[2:] == (False, False)
        return g * w * ctx.factor if need[0] else None, g * x * ctx.factor if need[1] else None, None, None


class SetUp(Function):
    @staticmethod
    def forward(x, y):
        return x.exp(), y.argmax(), x + y

    @staticmethod
    def setup_context(ctx, inputs, output):
        e, i, _ = output
        ctx.mark_non_differentiable(i)
        ctx.save_for_backward(e)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, ge, gi, gs):
        e, = ctx.saved_tensors
        assert gi is None
        gx = None if ge is None else ge * e
        if gs is not None:
            gx = gs if gx is None else gx + gs
        return gx, gs


class Double_(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.sin())
        return x.cos()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return -g * ctx.saved_tensors[0]


class Through(Function):  # straight through: the input itself, as a view
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class Reverse(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class Raises(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        raise ValueError("no gradient here")


FUNCTIONS = {
    "saved": lambda x, y: Triple.apply(x) * y,
    "twice": lambda x, y: Triple.apply(Triple.apply(x)) + Triple.apply(y),
    "more arguments": lambda x, y: Scaled.apply(x, y, 2.5, "text"),
    "needs_input_grad": lambda x, y: Scaled.apply(x, y.detach(), 2.5, "text"),
    "setup_context": lambda x, y: SetUp.apply(x, y),
    "some results": lambda x, y: (SetUp.apply(x, y)[0] * 2, SetUp.apply(x, y)[1]),
    "mark_dirty": lambda x, y: Double_.apply(x * 1) * y,
    "once_differentiable": lambda x, y: Once.apply(x) * y,
    "straight through": lambda x, y: Through.apply(x * 3) * y,
    "reversed": lambda x, y: Reverse.apply(x * 3) * y,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_autograd_function(name):
    check(FUNCTIONS[name], TWO)


def test_autograd_function_some_results_used():
    for used in ((0,), (2,), (0, 2)):
        check(lambda x, y: SetUp.apply(x, y), TWO, then=gradients.only(*used), native="forward")


def test_autograd_function_of_one_constant_input():
    check(FUNCTIONS["more arguments"], lambda: [leaf(2, 3), leaf(2, 3, seed=2, grad=False)])


def test_autograd_function_on_an_argument():
    """The result of marking the argument dirty is the argument."""
    fn, args = (lambda x: Double_.apply(x)), (lambda x: [x * 1])  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = vitrify.compile(fn)
        for _ in range(3):
            gradients.same(gradients.Run(compiled, leaves((3,))(), before=args), gradients.Run(fn, leaves((3,))(), before=args))


@pytest.mark.eager("no gradient here")
def test_autograd_function_whose_backward_raises():
    fn = lambda x: Raises.apply(x) * 3  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = vitrify.compile(fn)
        for _ in range(2):
            gradients.same(gradients.Run(compiled, leaves((3,))()), gradients.Run(fn, leaves((3,))()))
    assert vitrify.counters["compiled_calls"] == 0


@pytest.mark.eager("Logs may write in its backward")
def test_autograd_function_with_python_state_in_backward():
    """Eagerly: its Python runs with every backward."""
    log = []

    class Logs(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            log.append(1)
            return g * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fn = vitrify.compile(lambda x: Logs.apply(x) * 3)
        for _ in range(5):
            x = leaf(3)
            fn(x).sum().backward()
            torch.testing.assert_close(x.grad, torch.full((3,), 6.0))
    assert len(log) == 5


# ---- custom ops

@pytest.fixture(scope="module")
def custom():
    @torch.library.custom_op("vitrify_training::cube", mutates_args=())
    def cube(x: torch.Tensor, k: float) -> torch.Tensor:
        return x ** 3 * k

    @cube.register_fake
    def _(x, k):
        return torch.empty_like(x)

    def setup(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.k = inputs[1]

    cube.register_autograd(lambda ctx, g: (g * 3 * ctx.saved_tensors[0] ** 2 * ctx.k, None), setup_context=setup)

    @torch.library.custom_op("vitrify_training::plain", mutates_args=())
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @plain.register_fake
    def _(x):
        return torch.empty_like(x)
    return cube, plain


def test_custom_op_with_a_derivative(custom):
    cube, _ = custom
    check(lambda x, y: cube(x, 0.5) * y, TWO)


@pytest.mark.eager("Trying to backward through vitrify_training.plain.default")
def test_custom_op_without_a_derivative(custom):
    _, plain = custom
    fn = lambda x, y: plain(x) * y  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = vitrify.compile(fn)
        for _ in range(2):
            gradients.same(gradients.Run(compiled, TWO()), gradients.Run(fn, TWO()))
    check(lambda x, y: plain(x) * y, lambda: [leaf(2, 3, grad=False), leaf(2, 3, seed=2)], native="none")


# ---- ops that have no derivative

@pytest.mark.parametrize("fn", [lambda x, y: torch.nextafter(x, y), lambda x, y: x.frexp().mantissa * y, lambda x, y: torch.heaviside(x, y), lambda x, y: torch.igamma(x, y),
                                lambda x, y: torch.special.zeta(x + 2, y + 1), lambda x, y: x.histc(4), lambda x, y: torch.bucketize(x, y[0].detach()) * y])
@pytest.mark.compiled("ATen computes it")
@pytest.mark.eager("is not implemented", some=True)
def test_ops_without_a_derivative(fn):
    """Eager's exception, where and as eager raises it."""
    compiled = vitrify.compile(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            gradients.same(gradients.Run(compiled, TWO()), gradients.Run(fn, TWO()))


# ---- checkpoint

class Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.a, self.b, self.p = nn.Linear(8, 16), nn.Linear(16, 8), p

    def forward(self, x):
        return x + F.dropout(self.b(F.gelu(self.a(x))), self.p, self.training)


def pair(build):
    torch.manual_seed(5)
    m = build()
    return m, list(m.parameters())


class Checkpointed(nn.Module):
    def __init__(self, p=0.0, n=2, **how):
        super().__init__()
        self.blocks, self.how = nn.ModuleList(Block(p) for _ in range(n)), how

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, **self.how)
        return x


HOW = [dict(use_reentrant=False), dict(use_reentrant=False, preserve_rng_state=False)]


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_checkpoint(how, p):
    """Dropout too: the same draws again, or fresh ones where eager draws afresh; the generator ends where eager's does."""
    m, parameters = pair(lambda: Checkpointed(p, **how))
    check(m, leaves((4, 8)), "draws other numbers when a checkpoint is computed again" if p and how == HOW[1] else None, extra=parameters)


def test_checkpoint_nested():
    def inner(block, x):
        return checkpoint(block, x, use_reentrant=False).sin()
    m, parameters = pair(lambda: Block(0.3))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = m

        def forward(self, x):
            return checkpoint(functools.partial(inner, self.m), x, use_reentrant=False)
    check(Outer(), leaves((4, 8)), extra=parameters)


def test_checkpoint_sequential():
    m, parameters = pair(lambda: nn.Sequential(*(Block() for _ in range(4))))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = m

        def forward(self, x):
            return checkpoint_sequential(self.m, 2, x, use_reentrant=False)
    check(Outer(), leaves((4, 8)), extra=parameters)


def test_reentrant_checkpoint_without_an_argument_that_needs_gradients():
    m, _ = pair(lambda: Block())
    fn, x = lambda x: checkpoint(m, x, use_reentrant=True), torch.ones(4, 8)  # noqa: E731
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        ours, eager = vitrify.compile(fn)(x), fn(x)
    torch.testing.assert_close(ours, eager)
    assert not ours.requires_grad and not eager.requires_grad
    assert vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0


def test_checkpoint_selective():
    m, parameters = pair(lambda: Block())
    policy = lambda ctx, op, *a, **k: CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE  # noqa: E731

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = m

        def forward(self, x):
            return checkpoint(self.m, x, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))
    check(Outer(), leaves((4, 8)), extra=parameters)


@pytest.mark.eager("once more when a checkpoint is computed again")
def test_checkpoint_that_writes_runs_eagerly():
    """Eager's batch norm counts twice."""
    def make():
        return pair(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))[0]
    counts = []
    for compiled in (False, True):
        m = make()
        fn = lambda x: checkpoint(m, x, use_reentrant=False)  # noqa: E731, B023
        with warnings.catch_warnings(record=True) as log:
            warnings.simplefilter("always")
            f = vitrify.compile(fn) if compiled else fn
            for i in range(3):
                f(leaf(4, 8, seed=i)).sum().backward()
        counts.append([m[1].running_mean, m[1].running_var, m[1].num_batches_tracked])
        assert bool(compiled) == any("computed again" in str(w.message) for w in log)
    torch.testing.assert_close(*counts)
    assert counts[1][2] == 6


def test_checkpoint_around_the_call():
    """Not inside: eager's checkpoint runs the compiled call twice."""
    m, parameters = pair(lambda: Block(0.4))
    for reentrant in (False, True):
        t = vitrify.compile(m)
        results = []
        for f in (t, m):
            torch.manual_seed(3)
            for p in parameters:
                p.grad = None
            x = leaf(4, 8)
            checkpoint(f, x, use_reentrant=reentrant).sum().backward()
            results.append([x.grad, *(p.grad for p in parameters), torch.get_rng_state()])
        torch.testing.assert_close(results[0], results[1])


def test_checkpoint_of_what_draws_nothing_is_exact():
    m, parameters = pair(lambda: Checkpointed(0.0, 1, use_reentrant=False))
    plain = vitrify.compile(m.blocks[0])
    x, y = leaf(4, 8), leaf(4, 8)
    vitrify.compile(m)(x).sum().backward()
    ours = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    plain(y).sum().backward()
    for a, p in zip(ours, parameters):
        exact(a, p.grad)
