"""Hooks on saved tensors around a program are given what eager's nodes save, and not what a checkpoint's function finds by itself: that it reads as it is by
then. A weight that was changed in between was read as it had been."""
import itertools

import bounds
import pytest
import torch
import vitrify
from torch.utils.checkpoint import checkpoint

pack, unpack = vitrify.mark_lossless(lambda t: t.detach().numpy().copy()), vitrify.mark_lossless(torch.from_numpy)


def finds_argument(x, w):
    return checkpoint(lambda a: (a * w).exp().sin(), x, use_reentrant=False)


def given_argument(x, w):
    return checkpoint(lambda a, b: (a * b).exp().sin(), x, w, use_reentrant=False)


def finds_result(x, w):
    y = (x * 2).sin()
    return checkpoint(lambda a: (a * y).exp() * y, w, use_reentrant=False), y


def finds_in_two(x, w):
    return checkpoint(lambda a: (a * w).exp(), checkpoint(lambda a: (a * w).sin(), x, use_reentrant=False), use_reentrant=False)


def finds_what_hooks_take(x, w):
    return checkpoint(lambda a: (a * w).exp(), x, use_reentrant=False) * w.sin()


PROGRAMS = [finds_argument, given_argument, finds_result, finds_in_two, finds_what_hooks_take]
CHANGES = {"none": lambda t: None, "in place": lambda t: t.detach().mul_(1.1), "data": lambda t: t.data.mul_(1.1), "assigned": lambda t: setattr(t, "data", t.detach() * 1.1)}


def gradients(f, change, which):
    torch.manual_seed(0)
    x, w = (torch.rand(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = f(x, w)
    out = out if isinstance(out, tuple) else (out,)
    CHANGES[change]({"w": w, "x": x, "out": out[-1]}[which])
    try:
        return [g.detach() for g in torch.autograd.grad(out[0].sum(), (x, w))]
    except RuntimeError as e:
        return str(e).partition("]")[0]


@pytest.mark.eager("hooks take a tensor that a checkpoint's function finds by itself, too", some=True)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("f", PROGRAMS)
def test_checkpoints_behind_hooks(f, dynamic):
    compiled = vitrify.compile(f, dynamic=dynamic)
    for change, which in itertools.product(CHANGES, ("x", "w", "out")):
        ours, eager = gradients(compiled, change, which), gradients(f, change, which)
        assert isinstance(ours, str) == isinstance(eager, str), (change, which, ours, eager)
        if isinstance(eager, str):
            assert ours == eager
        else:
            for a, b in zip(ours, eager, strict=True):
                torch.testing.assert_close(a, b, **bounds.DEEP, msg=lambda m: f"{change} {which}: {m}")
