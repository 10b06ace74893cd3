"""Formulas of the user's: what they read, by which of the results have a gradient, and as what it is by then."""
import sys
from pathlib import Path

import pytest
import torch
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from gradients import backward, check, leaves, only  # noqa: E402


class Chooses(torch.autograd.Function):
    """With both gradients it reads y alone, with the first x, with the second z."""

    @staticmethod
    def forward(ctx, x, y, z):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y, z)
        return x * y, x + z

    @staticmethod
    def backward(ctx, a, b):
        x, y, z = ctx.saved_tensors
        if a is None:
            return b * z, None, b * z.exp()
        if b is None:
            return a * x, a * x.sin(), None
        return a * y + b, a * y, b


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("inner", [False, True], ids=["alone", "within"])
def test_it_reads_something_else_for_some_of_the_results(used, inner):
    fn = (lambda x, y, z: tuple(t.sin() for t in Chooses.apply(x.exp(), y * 2, z.cos()))) if inner else Chooses.apply
    check(fn, leaves((3, 4), (3, 4), (3, 4)), then=only(*used), native="forward")


class Attributes(torch.autograd.Function):
    """What it reads are attributes of its ctx, whose versions nobody looks at."""

    @staticmethod
    def forward(ctx, x, w):
        y = x.exp()
        ctx.x, ctx.w, ctx.y = x, w, y
        return y * w, y

    @staticmethod
    def backward(ctx, a, b):
        return (a * ctx.w + b) * ctx.y, a * ctx.x


class Saves(Attributes):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx, a, b):
        x, w = ctx.saved_tensors
        return a * w + b, a * x + b


def written(which, write, more):
    def then(out, args):
        t = [*args, *out][which]
        with torch.no_grad():
            t.mul_(3) if write == "counted" else t.data.mul_(3)
        if more == "second":
            heads = [o.sin().sum() for o in out]
            grads = torch.autograd.grad(heads, args, create_graph=True)
            return [g.detach() for g in grads], torch.autograd.grad(sum(g.square().sum() for g in grads), args)
        return backward(out, args)
    return then


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
@pytest.mark.parametrize("write", ["counted", "unseen"])
@pytest.mark.parametrize("which, more", [(0, "first"), (0, "second"), (1, "first"), (1, "second"), (3, "first")], ids=["the input", "the input, second order", "the weight", "the weight, second order", "a result"])
@pytest.mark.parametrize("fn", [Attributes, Saves])
def test_what_it_reads_is_written_in_between(fn, which, write, more):
    check(lambda x, w: fn.apply(x.sin(), w) if which else fn.apply(x, w), leaves((3, 4), (3, 4)), then=written(which, write, more), native="none" if fn is Saves and write == "counted" else "forward", calls=2)


class WritesItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g.mul_(3)


@pytest.mark.eager("writes in a backward to what was there before", some=True)
@pytest.mark.parametrize("program", [WritesItsGradient.apply, lambda x: WritesItsGradient.apply(x.sin()).cos(), lambda x: WritesItsGradient.apply(x.sin()) + x],
                         ids=["at the end", "within", "beside"])
def test_a_backward_writes_into_its_gradient(program):
    """The caller's gradient stayed as it was."""
    told = []
    for f in (program, vitrify.compile(program)):
        x = torch.linspace(-1, 1, 12).requires_grad_()
        y = f(x)
        g = torch.ones_like(y)
        y.backward(g)
        told.append((y.detach(), x.grad, g))
    for eager, ours in zip(*told):
        torch.testing.assert_close(ours, eager)


@pytest.mark.eager("writes in a backward to what was there before")
@pytest.mark.parametrize("given", [False, True])
def test_it_writes_into_its_gradient_at_second_order(given):
    told = []
    for make in (lambda f: f, vitrify.compile):
        f = make(lambda x: WritesItsGradient.apply(x.sin()).exp())
        for _ in range(2):
            x = torch.linspace(-1, 1, 12, dtype=torch.float64).requires_grad_()
            y = f(x)
            g = torch.ones_like(y) if given else None
            dx, = torch.autograd.grad(y if given else y.sum(), x, g, create_graph=True)
            ddx, = torch.autograd.grad(dx.square().sum(), x)
            told.append((dx.detach(), ddx, *([g] if given else [])))
    torch.testing.assert_close(told[2:], told[:2])


@pytest.mark.eager("writes in a backward to what was there before")
@pytest.mark.parametrize("hooked", [False, True])
def test_a_backward_through_one_result_brings_it_the_tangent(hooked):
    """Through both it is given a sum, to which it may write: which of them come is known when the call is long over."""
    told = []
    for make in (lambda f: f, vitrify.compile):
        f = make(lambda x: (y := WritesItsGradient.apply(x * 1), y.sum()))
        for _ in range(2):
            x = torch.linspace(-1, 1, 12).requires_grad_()
            y, s = f(x)
            if hooked:
                y.register_hook(lambda g: g * 2)
            ((y * y.detach()).sum() + (s if hooked else 0)).backward()
            told.append(x.grad)
    torch.testing.assert_close(told[2:], told[:2])


class GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        return x * y

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


@pytest.mark.parametrize("inner", [False, True], ids=["alone", "within"])
def test_a_gradient_that_is_none_and_a_gradient_of_another_comes_there(inner):
    """There was no way to an input that the backward gives no gradient, and reads for another."""
    fn = (lambda x, y: GivesNone.apply(x.sin(), y * 2).exp()) if inner else GivesNone.apply

    def run(f):
        x, y, z = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True), torch.ones(3, requires_grad=True)
        g, = torch.autograd.grad(f(x * z, y).sum(), x, create_graph=True)
        h = torch.autograd.grad(g.square().sum(), [x, y, z], create_graph=True, allow_unused=True)
        return [g, *h, *torch.autograd.grad(sum(t.sum() for t in h if t is not None), [x, y, z], allow_unused=True)]
    torch.testing.assert_close(run(vitrify.compile(fn, fullgraph=True)), run(fn))


def test_a_gradient_that_is_none():
    def run(f):
        x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        out = f(x, y)
        unused = torch.autograd.grad(out.sum(), [x, y], allow_unused=True, retain_graph=True)[1]
        out.sum().backward()
        return x.grad, y.grad, unused
    assert str(run(vitrify.compile(GivesNone.apply, fullgraph=True))) == str(run(GivesNone.apply))
