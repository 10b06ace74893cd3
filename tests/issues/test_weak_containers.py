"""Tensors that a program reaches by way of a weak set or a weak dict: what it set of them was set once, to a placeholder."""
import weakref

import expects
import pytest
import torch
import vitrify
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

HELD = {"set": lambda w: weakref.WeakSet([w]), "dict": lambda w: WeakTensorKeyDictionary({w: 1}), "modules": lambda w: weakref.WeakSet([w])}


def change(t, what, x):
    if what == "data":
        t.data = x * 2
    elif what == "attribute":
        t.mine = x * 2
    else:
        t.grad = x * 2 if what == "grad" else None


@pytest.mark.eager(".data", "attribute", "has by another name", "sets", "may look at", "it makes gradients", "it writes", some=True)
@pytest.mark.parametrize("what", ["grad", "none", "data", "attribute"])
@pytest.mark.parametrize("held", HELD)
def test_what_is_set(held, what):
    expects.no_kernels("most run eagerly")
    told = []
    for compiles in (False, True):
        net = nn.Module()
        net.w = w = nn.Parameter(torch.ones(4))
        keeps = HELD[held](net if held == "modules" else w)

        def f(x):
            t = next(iter(keeps))  # noqa: B023
            change(t.w if held == "modules" else t, what, x)
            return x + 1
        f = vitrify.compile(f) if compiles else f
        for n in range(3):
            w.grad = torch.ones(4) if what == "none" else w.grad
            out = f(torch.full((4,), 1.0 + n))
            told.append([t if t is None else t.tolist() for t in (out, w.grad, w, getattr(w, "mine", None))])
    assert told[3:] == told[:3]
