"""A second derivative raised wherever a node that cannot be differentiated lay behind a root: eager's engine runs what lies on a way to what is asked for."""
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
import vitrify
from compare import check_value
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, g, x):
        ctx.save_for_backward(x)
        return g * 2 * x

    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError("no second derivative")


def square_by(derivative):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return derivative.apply(g, *ctx.saved_tensors)
    return Square


Square = square_by(Refuses)


def attention(x):
    return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0]


PROGRAMS = {
    "a sum": lambda x, u: F.hardsigmoid(x) + x * u,
    "attention": lambda x, u: attention(x) + x * u,
    "distances": lambda x, u: torch.pdist(x).sum() + x * u * x,
    "of Python": lambda x, u: Square.apply(x) + x * x * u,
    "a checkpoint": lambda x, u: checkpoint(lambda a, b: Square.apply(a) + a * b, x, u, use_reentrant=False) + x * u,
    "two results": lambda x, u: (F.hardsigmoid(x) * 2, x.exp() * u),
    "always on the way": lambda x, u: F.hardsigmoid(x * u) + x.sin() * u,
    "some edges": lambda x, u: (torch.cdist(x, u), (x * u).sin()),
}


def total(result):
    return sum(r.sum() for r in (result if isinstance(result, tuple) else (result,)) if r is not None and r.requires_grad)


def first(f, x, u):
    return grad(total(f(x, u)), (x, u), create_graph=True)


def of_one(asked):
    return lambda f, x, u: grad(first(f, x, u)[0].sum(), (x, u)[asked])


def of_both(f, x, u):
    return grad([q.sum() for q in first(f, x, u) if q.requires_grad], u)


def batched(f, x, u):
    q = first(f, x, u)[0]
    return grad(q, u, torch.linspace(-1, 1, 3 * q.numel()).view(3, *q.shape), is_grads_batched=True)


def backward_to(asked):
    def run(f, x, u):
        q = total(first(f, x, u))
        q.backward(inputs=[(x, u)[asked]] if asked < 2 else None)
        return x.grad, u.grad
    return run


def in_turn(f, x, u):
    """What has raised has not run, and what ran before is freed."""
    q, said = first(f, x, u)[0].pow(2).sum(), []
    for asked, retain in ((u, True), (x, True), (u, True), (x, False)):
        try:
            said += grad(q, asked, retain_graph=retain)
        except (RuntimeError, NotImplementedError) as e:
            said.append(f"{type(e).__name__}: {e}")
    return said


def third(f, x, u):
    q = grad(total(f(x, u)).pow(2), x, create_graph=True)[0]
    return grad(grad(q.pow(2).sum(), u, create_graph=True)[0].pow(2).sum(), u)


USES = {
    "behind it": of_one(0), "beside it": of_one(1), "of both": of_both, "batched": batched, "backward": backward_to(2), "inputs behind": backward_to(0),
    "inputs beside": backward_to(1), "in turn": in_turn, "third": third,
}


def run(use, f, dtype=torch.float32):
    x, u = torch.linspace(-1, 1, 16, dtype=dtype).view(4, 4).requires_grad_(), torch.linspace(0.5, 2, 16, dtype=dtype).view(4, 4).requires_grad_()
    try:
        return list(use(f, x, u))
    except (RuntimeError, NotImplementedError) as e:
        return f"{type(e).__name__}: {e}"


# Distances have second derivatives from 2.15 on: those of points at equal distances cancel, and may be NaN in fp64 too.
CANCEL = {"distances", "some edges"} if not isinstance(run(of_both, PROGRAMS["distances"]), str) else ()


def alike(name, ours, eager, exact):
    assert len(ours) == len(eager)
    for k, (a, b) in enumerate(zip(ours, eager)):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            assert a == b
        elif name in CANCEL and a.shape == b.shape and a.dtype == b.dtype and not torch.allclose(a, b, rtol=1.3e-6, atol=1e-5):
            check_value(f"result {k}", a, b, exact[k], elementwise=False)
        else:
            torch.testing.assert_close(a, b)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_only_what_is_asked_for_raises(name, use, dynamic):
    f, expected, exact = vitrify.compile(PROGRAMS[name], dynamic=dynamic), run(USES[use], PROGRAMS[name]), run(USES[use], PROGRAMS[name], torch.float64)
    for _ in range(2):
        alike(name, run(USES[use], f), expected, exact)
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["eager_calls"] == 0


def test_an_error_that_is_kept_holds_no_tensors():
    """It held the frames that it had gone through."""
    f, held = vitrify.compile(lambda x, u: Square.apply(x) * u), []
    for _ in range(3):
        x, u = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
        held.append(weakref.ref(x))
        with pytest.raises(NotImplementedError, match="no second derivative"):
            grad(first(f, x, u)[0].sum(), x)
    del x, u
    gc.collect()
    assert [r() for r in held] == [None] * 3


class Told(Exception):
    def __init__(self, code, *, reason):
        super().__init__(code)
        self.reason = reason


def test_an_error_of_users_comes_whole_each_time():
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx, g, x):
            return g * 2 * x

        @staticmethod
        def backward(ctx, g):
            try:
                {}["missing"]
            except KeyError as e:
                raise Told(7, reason="none") from e

    square = square_by(Refuses)
    f, raised = vitrify.compile(lambda x, u: square.apply(x) * u), []
    for _ in range(2):
        with pytest.raises(Told) as e:
            x, u = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
            grad(first(f, x, u)[0].sum(), x)
        raised.append(e.value)
    assert raised[0] is not raised[1]
    assert all(e.args == (7,) and e.reason == "none" and repr(e.__cause__) == "KeyError('missing')" for e in raised)
