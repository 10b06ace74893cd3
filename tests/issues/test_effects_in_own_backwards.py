"""What the backward of a user's own Function does besides its gradients, as Python values or the gradients that come decide: captures run one path of its
code, and for gradients that come otherwise they run it when the call is long over. Such Functions run eagerly."""
import io
import logging

import pytest
import torch
import vitrify
from torch import nn

W = nn.Parameter(torch.full((2, 3), 2.0))
BUFFER = torch.zeros(2, 3)
LOG, SEEN, DICT = [], set(), {}
COUNT, ON = 0, False
OUT, LOGGER = io.StringIO(), logging.getLogger("own backwards")


class Holder:
    count, kept = 0, None


def helper(g):
    LOG.append(g * 3)
    return g


def function(then, when):
    """Its backward does `then` where `when` says so."""
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.kept, ctx.times = {}, []
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            x, = ctx.saved_tensors
            if when(g):
                then(ctx, g)
            return g * x.cos()
    return Own.apply


def into_global(ctx, g):
    global COUNT
    COUNT += 1


def into_attribute(ctx, g):
    Holder.count, Holder.kept = Holder.count + 1, g * 2


def through_alias(ctx, g):
    d = DICT
    d["g"] = g * 2


def without_gradients(ctx, g):
    with torch.no_grad():
        W[0] = 1.0


def augmented(ctx, g):
    b = BUFFER
    b += g.detach()


EFFECTS = {
    "a list": (lambda ctx, g: LOG.append(g * 2), "may write in its backward"), "a helper": (lambda ctx, g: helper(g), "may write in its backward"),
    "a set": (lambda ctx, g: SEEN.add(g.shape), "may write in its backward"), "a dict": (through_alias, "may write in its backward"),
    "a dict of its ctx": (lambda ctx, g: ctx.kept.update(g=g), "may write in its backward"), "a list of its ctx": (lambda ctx, g: ctx.times.append(1), "may write in its backward"),
    "a global": (into_global, "changes a global"), "attributes": (into_attribute, "changes an attribute"),
    "setattr": (lambda ctx, g: setattr(Holder, "kept", g), "may change attributes"), "a buffer": (lambda ctx, g: BUFFER.add_(1), "may write in its backward"),
    "data": (lambda ctx, g: W.data.mul_(2), "may write in its backward"), "a weight": (without_gradients, "may write in its backward"),
    "augmented": (augmented, "may write in its backward"), "out": (lambda ctx, g: torch.mul(g.detach(), 2, out=BUFFER), "may write in its backward"),
    "a stream": (lambda ctx, g: OUT.write("w"), "writes to a stream"), "a logger": (lambda ctx, g: LOGGER.info("w"), "writes to a stream"),
    "seed": (lambda ctx, g: torch.manual_seed(3), "sets or reads generators"), "state": (lambda ctx, g: torch.set_rng_state(torch.get_rng_state()), "sets or reads generators"),
}
WHEN = {"a value": lambda g: ON, "strides": lambda g: not g.is_contiguous(), "create_graph": lambda g: torch.is_grad_enabled()}


def reset():
    global COUNT, ON
    COUNT, ON = 0, False
    Holder.count, Holder.kept = 0, None
    OUT.seek(0), OUT.truncate()
    LOG.clear(), SEEN.clear(), DICT.clear()
    with torch.no_grad():
        W.copy_(torch.full((2, 3), 2.0))
        BUFFER.zero_()
    torch.manual_seed(0)


@pytest.mark.eager(*{reason for _, reason in EFFECTS.values()}, some=True)
@pytest.mark.sweep(3)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("name", EFFECTS)
def test_effects(name, when):
    def told(compile):
        global ON
        reset()
        f = compile(lambda x, apply=function(EFFECTS[name][0], WHEN[when]): apply(x) * W.sum() + BUFFER.sum())
        x, seen = torch.arange(6.0).view(2, 3).requires_grad_(), []
        for k in range(3):
            y = f(x)
            ON = k == 1
            t = torch.ones(3, 2).t() if k == 1 else torch.ones(2, 3)
            g, = torch.autograd.grad(y, x, t, create_graph=k == 1)
            ON = False
            seen += [y.detach().clone(), g.detach().clone(), W.detach().clone(), BUFFER.clone(), torch.rand(1)]
        return seen, [t.detach().clone() for t in LOG], len(SEEN), {k: v.detach().clone() for k, v in DICT.items()}, COUNT, Holder.count, Holder.kept, len(OUT.getvalue())
    ours, eager = told(vitrify.compile), told(lambda f: f)
    torch.testing.assert_close(ours, eager)


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, g * x if w.requires_grad else g * 0


@pytest.mark.eager("reads requires_grad of a tensor")
def test_requires_grad_read():
    def told(compile):
        w = nn.Parameter(torch.full((3,), 2.0))
        f, x = compile(lambda x: Reads.apply(x, w)), torch.arange(3.0, requires_grad=True)
        seen = []
        for on in (True, False, True):
            y = f(x)
            w.requires_grad_(on)
            seen.append(torch.autograd.grad(y.sum(), x)[0])
            w.requires_grad_(True)
        return seen
    torch.testing.assert_close(told(vitrify.compile), told(lambda f: f))


class Mode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * (3 if torch.is_anomaly_enabled() else 2)


@pytest.mark.eager("reads a mode")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_modes_around_the_backward():
    def told(compile):
        f, x, seen = compile(Mode.apply), torch.arange(3.0, requires_grad=True), []
        for on in (False, True, False):
            y = f(x).sum()
            with torch.autograd.set_detect_anomaly(on):
                seen.append(torch.autograd.grad(y, x)[0])
        return seen
    torch.testing.assert_close(told(vitrify.compile), told(lambda f: f))


def inner(g):
    total = g

    def add(t):
        nonlocal total
        total = total + t
    for k in range(2):
        add(g * k)
    return total


OWN = {
    "a list": lambda ctx, g: sum([t for t in [g, g]]), "in place": lambda ctx, g: g.clone().mul_(2), "a part": lambda ctx, g: part(g), "lists that grow": lambda ctx, g: grown(g),
    "a function within": lambda ctx, g: inner(g), "augmented": lambda ctx, g: augmented_own(g), "own leaf": lambda ctx, g: of_leaf(ctx, g),
}


def part(g):
    r = g.clone()
    r[0] = 0
    return r


def grown(g):
    r = []
    for k in range(3):
        r.append(g * k)
    return torch.stack(r).sum(0)


def augmented_own(g):
    r = g * 2
    r += g
    return r


def of_leaf(ctx, g):
    x, = ctx.saved_tensors
    with torch.enable_grad():
        own = x.detach()
        own.requires_grad = True
        r, = torch.autograd.grad(own.exp().sum(), own)
    return r * g


@pytest.mark.parametrize("name", OWN)
def test_what_it_has_made(name):
    """It may write to that as it likes."""
    gradient = OWN[name]

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return gradient(ctx, g)

    def told(compile):
        f, x = compile(lambda x, apply=Own.apply: apply(x) * 2), torch.arange(6.0).view(2, 3).requires_grad_()
        return [torch.autograd.grad((f(x) * (k + 1)).sum(), x)[0] for k in range(3)]
    torch.testing.assert_close(told(lambda f: vitrify.compile(f, fullgraph=True)), told(lambda f: f))
