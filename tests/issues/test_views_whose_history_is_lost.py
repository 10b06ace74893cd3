"""A view that was made without gradients, or with others by one op, has no history any more when it is written: eager raises where it is read, in every call that reads it. What the
program only finds was read by plans of calls from before."""
import expects
import pytest
import torch
import vitrify
from torch import nn
from torch.utils.checkpoint import checkpoint
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


@pytest.mark.parametrize("way", ["whole", "some"])
@pytest.mark.parametrize("view", VIEWS)
def test_found_by_a_checkpoint(view, way):
    """Which reads it again in the backward."""
    told = []
    for compiles in (False, True):
        w, v = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((2,), 2.0))
        t = VIEWS[view](w)
        f = lambda: (checkpoint(lambda a: a * t[:2].sin(), v * 1, use_reentrant=False), v * 3)  # noqa: B023, E731
        f = vitrify.compile(f, fullgraph=True) if compiles else f
        seen = []
        for n in range(2):
            a, b = f() if n == 0 else (kept, b)  # noqa: F821
            kept = a
            if n == 1:
                t.detach().add_(1)
            try:
                torch.autograd.backward([a.sum()] if way == "some" else [a.sum(), b.sum()], retain_graph=True)
            except RuntimeError as e:
                seen.append(str(e)[:50])
            seen += [None if g is None else [round(x, 5) for x in g.tolist()] for g in (w.grad, v.grad) if n == 0]
        told.append(seen)
    assert told[1] == told[0] and isinstance(told[0][-1], str)


def test_written_by_a_list():
    """A write by torch._foreach_* is one as by any other op."""
    for write in (lambda t: torch._foreach_mul_([t], 2), lambda t: t.mul_(2)):
        def program(w, write=write):
            with torch.no_grad():
                part = w[1:]
                write(w)
            return part, w * 3
        expects.eager("returns one of several views")
        told = []
        for f in (program, vitrify.compile(program)):
            part, _ = f(nn.Parameter(torch.ones(4)))
            with pytest.raises(RuntimeError) as e:
                part.grad_fn  # noqa: B018
            told.append(str(e.value)[:60])
        assert told[0] == told[1]
