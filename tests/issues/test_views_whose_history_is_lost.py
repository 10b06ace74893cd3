"""A view that was made without gradients, or with others by one op, has no history any more when it is written: eager raises where it is read, in every call that reads it. What the
program only finds was read by plans of calls from before."""
import expects
import pytest
import torch
import vitrify
from torch import nn
from vitrify import _C

VIEWS = {"no_grad": lambda w: torch.no_grad()(lambda: w[1:])(), "chunk": lambda w: w.chunk(2)[0], "split": lambda w: w.split(2)[1], "of a value": lambda w: (w * 1).chunk(2)[0]}
PROGRAMS = {"read": lambda t, w: t * 2, "for nothing": lambda t, w: (t * 2, w * 3)[1], "detached": lambda t, w: t.detach() * 2, "without gradients": lambda t, w: torch.no_grad()(lambda: t * 2)(), "a view": lambda t, w: t[:1], "whether a view": lambda t, w: w * (2 if t._is_view() else 3),
            "the base": lambda t, w: w * (2 if t._base is None else 3), "its leaf": lambda t, w: torch.enable_grad()(lambda: w * (2 if t.is_leaf else 3))()}


@pytest.mark.eager("whose history cannot be made anew", "Output 0 of", "A view was created", "which follows from another", "Output 1 of", "of a tensor, which calls may not have in common", some=True)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("view", VIEWS)
def test_as_eager(view, name, given):
    if name == "a view":
        expects.compiled("there is nothing to compute")
    told = []
    for compiles in (False, True):
        w = nn.Parameter(torch.ones(4))
        t = VIEWS[view](w)
        f = (lambda t: PROGRAMS[name](t, w)) if given else lambda: PROGRAMS[name](t, w)  # noqa: B023
        f = vitrify.compile(f) if compiles else f
        seen = []
        for n in range(5):
            if n in (2, 4):
                t.detach().add_(1)
            with torch.set_grad_enabled(n != 3):
                try:
                    seen.append(f(*[t] * given).tolist())
                except RuntimeError as e:
                    seen.append(str(e)[:50])
        told.append(seen)
    assert told[1] == told[0]
    assert not _C.capturing()


@pytest.mark.parametrize("grad", [False, True])
def test_reached_and_not_read(grad):
    w = nn.Parameter(torch.ones(4))
    parts = w.unbind(0)
    f = vitrify.compile(lambda x: x * w + len(parts), fullgraph=True)
    with torch.no_grad():
        parts[0].add_(1)
    with torch.set_grad_enabled(grad):
        assert f(torch.ones(4)).tolist() == [6, 5, 5, 5]
