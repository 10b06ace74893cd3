"""A program returns a view and writes to its base afterwards. Once the base needs gradients, eager makes such a view's history anew; of one that was made after the write it does not."""
import pytest
import torch
import vitrify

H = torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3)
PROGRAMS = {
    "found": lambda h, x: (v := h.mT, h.__setitem__(0, 2.0), x * 2)[::2], "after the write": lambda h, x: (h.__setitem__(0, 2.0), h.mT, x * 2)[1:], "two": lambda h, x: (v := h.mT, h.add_(1), h[1:], x * 2)[::2] + (v,),
    "of a view": lambda h, x: (v := h[1:].mT, h.mul_(2), v[0], x * 2)[::3] + (v,), "by its data": lambda h, x: (v := h.mT, h.data.mul_(2), x * 2)[::2], "chunks": lambda h, x: (*h.chunk(3)[:2], h.mul_(2) * x)[:2],
    "without gradients": lambda h, x: (torch.no_grad()(lambda: h[1:])(), h.mul_(2), x * 2)[::2], "a result": lambda h, x: (y := x * 2, v := y.mT, y.mul_(2))[:2], "a result's view first": lambda h, x: (y := x * 2, v := y[1:], y.mul_(2), v.sin())[1:],
}


def seen(t, bases):
    try:
        told = [t.requires_grad, t.is_leaf]
        if t.requires_grad:
            told += [g is not None and g.tolist() for g in torch.autograd.grad((t * t).sum(), bases, allow_unused=True)]
        return told
    except RuntimeError as e:
        return str(e)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_eager(program, given, mode):
    told = []
    for make in (vitrify.compile, lambda f: f):
        h, states = H.clone(), []
        f = make(lambda x, h: PROGRAMS[program](h, x)) if given else make(lambda x: PROGRAMS[program](h, x))  # noqa: B023
        for _ in range(2):
            with mode():
                r = f(H + 1, h) if given else f(H + 1)
        states += [seen(t, [h]) for t in r]
        for base in (h, *r):
            if base._base is None:
                base.requires_grad_()
        states += [seen(t, [b for b in (h, *r) if b._base is None]) for t in r]
        told.append(states)
    assert told[0] == told[1]
