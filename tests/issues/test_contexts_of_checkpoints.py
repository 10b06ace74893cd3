"""Contexts of a checkpoint that can be entered once only: each derivative that was taken of a capture entered them again."""
import contextlib

import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch.utils.checkpoint import checkpoint


@contextlib.contextmanager
def nothing():
    yield


class Once:
    entered = False

    def __enter__(self):
        if self.entered:
            raise ValueError("entered a second time")
        self.entered = True

    def __exit__(self, *exc):
        pass


def shared(make):
    a, b = make(), make()
    return lambda: (a, b)


OTHERS = {
    "made anew": lambda: lambda: (nothing(), nothing()), "shared": lambda: shared(nothing), "in the backward": lambda: lambda: (contextlib.nullcontext(), nothing()),
    "a class": lambda: lambda: (Once(), Once()), "a shared one": lambda: shared(Once),
}
OF_TORCH = {
    "none": lambda: lambda: (contextlib.nullcontext(), contextlib.nullcontext()), "shared": lambda: shared(contextlib.nullcontext),
}
BODIES = {"dropout": lambda x, w: F.dropout((x * w).sin(), 0.5), "product": lambda x, w: (x @ w).tanh() * w.exp()}


def backward(y, x, w):
    y.sum().backward()
    return x.grad, w.grad


def twice(y, x, w):
    y.sum().backward(retain_graph=True)
    (y * y).sum().backward()
    return x.grad, w.grad


def again(y, x, w):
    first = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
    return *first, *torch.autograd.grad(first[0].square().sum(), (x, w))


def in_part(y, x, w):
    return *torch.autograd.grad(y.sum(), x, retain_graph=True), *torch.autograd.grad(y, w, torch.arange(16.0).view(4, 4).t())


def outcomes(f, how):
    """Of three calls."""
    for _ in range(3):
        torch.manual_seed(0)
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        try:
            y = f(x, w)
            yield [y.detach(), *(t.detach() for t in how(y, x, w))]
        except (AttributeError, ValueError, RuntimeError) as e:
            yield type(e), str(e)


def same(make, body, how, **options):
    results = [list(outcomes(around(lambda x, w, contexts=make(): checkpoint(body, x, w, use_reentrant=False, context_fn=contexts) + w), how))
               for around in (lambda f: vitrify.compile(f, **options), lambda f: f)]
    for ours, eager in zip(*results, strict=True):
        assert ours == eager if isinstance(eager, tuple) else torch.testing.assert_close(ours, eager) is None


HOW = pytest.mark.parametrize("how", [backward, twice, again, in_part], ids=lambda f: f.__name__)


@HOW
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("contexts", OTHERS)
def test_contexts_of_others(contexts, body, how, dynamic):
    expects.eager("enters contexts that are none of torch's")
    same(OTHERS[contexts], BODIES[body], how, dynamic=dynamic)


@HOW
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("contexts", OF_TORCH)
def test_contexts_of_torch(contexts, body, how):
    same(OF_TORCH[contexts], BODIES[body], how, fullgraph=True)
