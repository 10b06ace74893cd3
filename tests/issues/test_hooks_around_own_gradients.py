"""Hooks on saved tensors around a program that takes gradients itself: they see what those save, a checkpoint computes all of it again, and torch.func refuses them."""
import expects
import pytest
import torch
import vitrify
from torch import nn
from torch.utils.checkpoint import checkpoint

WHY = "hooks on saved tensors are around gradients that it takes itself"


def outcomes(compile, make, warm):
    """What hooks saw, errors, and the state, of a call as it is, if `warm`, and others with hooks around."""
    w, t, log = nn.Parameter(torch.ones(3)), torch.ones(3), []
    f = compile(make(w, t))

    def pack(saved):
        log.append("saved")
        return saved.clone()
    ways = [lambda: checkpoint(lambda _: f(), t, use_reentrant=False), lambda: torch.autograd.graph.saved_tensors_hooks(vitrify.mark_lossless(pack), lambda s: s)]
    for way in [None, *ways][not warm:]:
        try:
            if way is ways[1]:
                with way():
                    f()
            else:
                (way or f)()
        except RuntimeError as e:
            log.append(str(e).partition("\n")[0])
        log += [w.tolist(), w.grad is not None and [round(v, 5) for v in w.grad.tolist()]]
    return log


def writes(w, t):
    def program():
        made = t.exp()
        with torch.inference_mode():
            w.add_(1)
        (made * w * w).sum().backward()
    return program


def transforms(w, t):
    return lambda: torch.func.grad(lambda a: (a * a * w.sum()).sum())(t)


@pytest.mark.parametrize("make", [writes, transforms])
@pytest.mark.parametrize("warm", [True, False], ids=["known", "first"])
def test_hooks(make, warm):
    expects.eager(WHY, "refuses hooks on saved tensors", "is called again, and ran eagerly the first time", "gradients that are there from the first call on", some=True)
    if make is transforms and not warm:
        expects.no_kernels("all calls run eagerly")
    assert outcomes(vitrify.compile, make, warm) == outcomes(lambda f: f, make, warm)
