"""A derivative of the user's that gives what it was given or made, or a view of it, stands between the two: gradients go through it."""
import warnings

import expects
import pytest
import torch
import vitrify
from torch.autograd import Function


class Reverse(Function):
    """As it stands before an adversary's classifier."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g


class AsItIs(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Flat(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, g):
        return g.view(2, 3) * 5


PROGRAMS = {
    "reversed": lambda x, y: (Reverse.apply(x), x * y), "as it is": lambda x, y: (AsItIs.apply(x), y * 2), "flat": lambda x, y: (Flat.apply(x), x * y), "a view of it": lambda x, y: (Reverse.apply(x).t(), x * y), "of a view": lambda x, y: (Reverse.apply(x.t()), x * y),
    "twice": lambda x, y: (Reverse.apply(AsItIs.apply(x)), x * y), "computed with": lambda x, y: (Reverse.apply(x) * 2, x * y), "of what was computed": lambda x, y: (Reverse.apply(x * y), y * 2),
}


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name, leaf):
    if name not in ("computed with", "of what was computed"):
        expects.eager("returns what it was given, or a view of it, by a derivative of its own")
    results = []
    for compiled in (False, True):
        f = vitrify.compile(PROGRAMS[name]) if compiled else PROGRAMS[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                x, y = (torch.arange(1.0 + k, 7.0 + k).reshape(2, 3).requires_grad_() for k in range(2))
                out = f(x if leaf else x * 1, y)
                sum((o * o.detach().cos()).sum() for o in out).backward()
                results.append([*(o.detach() for o in out), x.grad, y.grad])
    for a, b in zip(results[:3], results[3:]):
        torch.testing.assert_close(a, b)
    if name in ("computed with", "of what was computed"):
        assert vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0


class Halves(Function):
    @staticmethod
    def forward(ctx, x):
        return x.chunk(2)

    @staticmethod
    def backward(ctx, a, b):
        return torch.cat([a, b]) * 5


class Diagonal(Function):
    @staticmethod
    def forward(ctx, x):
        return x.diagonal()

    @staticmethod
    def backward(ctx, g):
        return torch.nn.functional.pad(torch.diag(g), (0, 1)) * 5


class Tripled(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Twice(Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y, y.t()

    @staticmethod
    def backward(ctx, g, h):
        return g * 2 + h.t() * 3


class MadeHalves(Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y[:1], y[1:]

    @staticmethod
    def backward(ctx, a, b):
        return torch.cat([a, b]) * 2


def with_what_it_was_given(f):
    def program(x):
        h = x * 2
        return h, f(h)
    return program


def after_a_write(x):
    h = x * 1
    h.mul_(2)
    return h, Reverse.apply(h)


def of_what_it_writes(x):
    x.mul_(2)
    return Reverse.apply(x)


# The last: whether eager is needed, as another result shares its memory.
MADE = {
    "reversed": (with_what_it_was_given(Reverse.apply), True), "as it is": (with_what_it_was_given(AsItIs.apply), True), "a view of it": (with_what_it_was_given(lambda h: Reverse.apply(h).t()), True),
    "of a view": (with_what_it_was_given(lambda h: Reverse.apply(h.t())), True), "expanded": (with_what_it_was_given(lambda h: Reverse.apply(h.unsqueeze(0).expand(2, 2, 3))), True),
    "sliced": (with_what_it_was_given(lambda h: Reverse.apply(h[:, 1:])), True), "after a write": (after_a_write, True), "of what it writes": (of_what_it_writes, True),
    "chunks": (lambda x: Halves.apply(x * 2), True), "diagonal": (lambda x: Diagonal.apply(x * 2), True), "a result and its view": (Twice.apply, True), "views of what nobody is given": (MadeHalves.apply, True),
    "alone": (lambda x: Reverse.apply(x * 2), False), "views of it": (lambda x: (lambda h: (h, h.t(), h[0]))(Reverse.apply(x * 2)), True),
    "views of a value of its own": (lambda x: (lambda h: (h, h.t(), h[0]))(Tripled.apply(x * 2)), False),
    "views": (lambda x: (lambda h: (h, h.t(), *h.unbind(), h.view(-1)[2:]))(x * 2), False), "views written": (lambda x: (lambda h: (h, h[0].mul_(3), h.t().exp_()))(x * 2), False),
}


@pytest.mark.parametrize("name", MADE)
def test_views_of_what_it_made(name):
    """These were made again as views of the other result, or of hidden memory: the user's backward did not run."""
    fn, eagerly = MADE[name]
    if eagerly:
        expects.eager("by a derivative of its own", "returns a view of a leaf, which it makes", some=True)
    results = []
    for f in (fn, vitrify.compile(fn)):
        for used in (slice(None), slice(1), slice(-1, None)):
            x = torch.arange(1.0, 7.0).reshape(2, 3).requires_grad_()
            out = f(x * 1 if name == "of what it writes" else x)
            out = out if isinstance(out, tuple) else (out,)
            sum((o * o.detach().cos()).sum() for o in out[used]).backward()
            results.append([*(o.detach() for o in out), x.grad])
    for eager, ours in zip(results[:3], results[3:]):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("fn", [lambda x: torch.ldexp(x, torch.ones_like(x)), lambda x: torch.pow(x, torch.full_like(x, 2.0))], ids=["ldexp", "pow"])
def test_a_result_that_is_saved_for_another_gradient(fn):
    """Eager saves it for the gradient of the exponent, and notices that it was changed where only the other gradient is asked for."""
    said = []
    for f in (vitrify.compile(fn, fullgraph=True), fn):
        out = f(torch.linspace(1, 2, 4).requires_grad_())
        with torch.no_grad():
            out.add_(1)
        try:
            out.sum().backward()
            said.append(None)
        except RuntimeError as e:
            said.append("modified by an inplace operation" in str(e))
    assert said[0] == said[1]
