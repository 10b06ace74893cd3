"""A gradient is the sum of what nodes give in eager's order, also where one of them is a view that nobody else is given: its strides follow from it."""
from itertools import permutations, product

import pytest
import torch
import vitrify

STEPS = {"in place": lambda v: v.transpose_(-1, 0), "view": lambda v: v.transpose(-1, 0), "op": lambda v: v.transpose(-1, 0) * 2}
ORDERS = [o for o in sorted(permutations("aest")) if o.index("a") < o.index("t")]


def program(order, step, copies):
    def f(x):
        x, r = x.clone() if copies else x, {}
        for made in order:
            if made == "a":
                r["a"] = x + 1.0
            elif made == "e":
                r["e"] = x.expand(2, *x.shape)
            elif made == "s":
                r["s"] = torch.square(x)
            else:
                r["a"] = STEPS[step](r["a"])
        return r["a"], r["e"], r["s"]
    return f


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_strides(step, copies):
    for order in ORDERS:
        f = program(order, step, copies)
        compiled = vitrify.compile(f)
        for dims, like in product([(3, 1, 2, 0), (1, 0, 2, 3)], product([False, True], repeat=3)):
            grads = []
            for g in (f, compiled):
                torch.manual_seed(0)
                x = torch.randn(4, 2, 3, 5).permute(dims).requires_grad_()
                weights = [torch.randn_like(y) if same else torch.randn(y.shape) for y, same in zip(g(x), like)]
                grads += torch.autograd.grad(sum((y * w).sum() for y, w in zip(g(x), weights)), x)
            torch.testing.assert_close(grads[1], grads[0])
            assert grads[1].stride() == grads[0].stride(), (order, dims, like)
