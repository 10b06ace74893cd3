"""The order in which hooks of leaves and of results run, where one call has several autograd nodes: as in eager, each kind by itself.

Gradients of independent results go on together: hooks of all of them run before those of the leaves behind any, as eager's do where they follow from one another."""
import expects
import pytest
import torch
import vitrify


def chain(a, b, c, d, e):
    h = a * b
    i = (h * c).sin()
    return h, i, (i + d) * e


def apart(a, b, c, d, e):
    return a.sin() * b, c * d, e.exp()


def from_one(a, b, c, d, e):
    h = (a * b).sin()
    return h * c, (h * d).exp(), (h * e).tanh()


def crossed(a, b, c, d, e):
    h = a * b
    k = h * e
    return k, (h * c).sin(), k * d, c * d


def alone(a, b, c, d, e):
    return (a * b + c * d).sin() * e,


def pieces(a, b, c, d, e):
    h = torch.stack([a, b]).sin()
    p, q = h.unbind()
    return p * c, q * d, h * e, p


def views(a, b, c, d, e):
    h = (a * b).view(2, 2)
    return h.t() * c.view(2, 2), h[0] * d[:2], h.view(4) + e


def used_again(a, b, c, d, e):
    h = a * b
    i = h * c
    j = h * d
    return i * j, i + e, j.sin() * a


def leaf_of_two(a, b, c, d, e):
    return a * b, b * c, (d * e).sin()


def leaf_of_last_and_first(a, b, c, d, e):
    return a * b + e, c.sin() * d, (b * c).exp()


PROGRAMS = [leaf_of_two, leaf_of_last_and_first, chain, apart, from_one, crossed, alone, pieces, views, used_again]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("backward", [lambda outs: sum((o * (i + 1)).sum() for i, o in enumerate(outs)).backward(),
                                      lambda outs: torch.autograd.backward([o.sum() for o in outs]),
                                      lambda outs: torch.autograd.backward([o.sum() for o in outs[::-1]])], ids=["sum", "each", "the last first"])
@pytest.mark.parametrize("hooks", ["accumulated", "leaves", "leaves accumulated", "results", "results leaves accumulated"])
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_as_in_eager(fn, hooks, backward):
    seen = []
    if fn is pieces:  # test_hooks_of_parts.py
        expects.eager("returns a part of what it splits")
    for f in (vitrify.compile(fn, fullgraph=fn is not pieces), fn):
        torch.manual_seed(0)
        leaves, order = [torch.randn(4, requires_grad=True) for _ in range(5)], []
        for i, p in enumerate(leaves):
            if "accumulated" in hooks:
                p.register_post_accumulate_grad_hook(lambda t, i=i: order.append(("accumulated", i)))
            if "leaves" in hooks:
                p.register_hook(lambda g, i=i: order.append(("leaf", i)))
        outs = f(*leaves)
        for i, o in enumerate(outs):
            if "results" in hooks:
                o.register_hook(lambda g, i=i: order.append(("result", i)))
        backward(outs)
        seen.append([[o for o in order if (o[0] == "result") == results] for results in (False, True)])
    assert seen[0] == seen[1]
