"""A derivative of the user's that gives what it was given, or a view of it, stands between the two: gradients go through it."""
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
