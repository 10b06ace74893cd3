"""Programs that ask whether what they are given is a leaf: each call is answered as eager is."""
import expects
import pytest
import torch
import vitrify

FNS = {
    "is_leaf": lambda x: x * 2 if x.is_leaf else x.sin(),
    "grad_fn": lambda x: x * 2 if x.grad_fn is None else x.sin(),
    "neither": lambda x: x.exp().sin(),
}


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (1, 0, 1)], ids=str)
@pytest.mark.parametrize("name", FNS)
def test_calls_with_both(name, order):
    """The answer that the first call got was that of all."""
    fn = FNS[name]
    if name == "grad_fn":
        expects.eager("reads grad_fn of a tensor")  # that is no leaf: another history in each call
    compiled = vitrify.compile(fn, fullgraph=name != "grad_fn")
    for is_leaf in order:
        grads = []
        for f in (compiled, fn):
            x = torch.linspace(-1, 1, 6).requires_grad_(True)
            out = f(x if is_leaf else x * 1)
            out.sum().backward()
            grads.append((out.detach(), x.grad))
        torch.testing.assert_close(grads[0], grads[1])


def by_view(x):
    v = x.view(-1)
    with torch.enable_grad():
        return v * v, v.sin()


def by_part(x):
    v = x[1:]
    with torch.enable_grad():
        y = v.exp()
    return y, v


def by_view_of_it(x):
    v = x.t()
    with torch.enable_grad():
        return v[0] * 2


VIEWED = {"a view": by_view, "a part": by_part, "a view of it": by_view_of_it, "computed": lambda x: x.view(-1).sin() + 1}
LEAVES = {"a tensor": lambda: torch.ones(3, 4).requires_grad_(), "a view": lambda: torch.ones(4, 4)[1:].requires_grad_(), "needs none": lambda: torch.ones(4, 4)[1:], "no leaf": lambda: (torch.ones(4, 4).requires_grad_() * 2)[1:]}


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("name", VIEWED)
def test_a_leaf_that_is_a_view_is_viewed_in_no_grad(name, leaf):
    """Eager's view of it has its base, which needs no gradients: what follows where they are recorded needs none either."""
    if leaf == "a view" and name != "computed":
        expects.eager("a leaf that is a view, in no_grad, and reads it where gradients may follow")
    def told(f):
        with torch.no_grad():
            out = f(LEAVES[leaf]())
        return [(t.requires_grad, t.tolist()) for t in (out if isinstance(out, tuple) else (out,))]
    assert told(vitrify.compile(VIEWED[name])) == told(VIEWED[name])
