"""Nodes of a call that a backward does not come to do not run, also where some of them lead to others: one raised a version error of what it had saved."""
import itertools

import pytest
import torch

import vitrify


def program(foreach, added, zeroed):
    def f(x):
        x = x * 1
        v = torch._foreach_mul([x, x], [2.0, 3.0])[1] if foreach else x.clone() * x * 3
        w = v.clone()
        if added:
            w.add_(x)
        if zeroed:
            v.zero_()
        last = x.clone()
        x.masked_fill_(x > 0, 1)
        return torch._foreach_mul([v, w], [2.0, 3.0])[1] if foreach else v * w, v, last
    return f


@pytest.mark.parametrize("how", itertools.product([False, True], repeat=3), ids=lambda how: "-".join(n for n, on in zip(("foreach", "added", "zeroed"), how) if on) or "plain")
@pytest.mark.parametrize("which", [[2], [1], [1, 2], [0], [0, 2]], ids=str)
def test_only_what_leads_to_it_raises(how, which):
    f = program(*how)

    def outcome(call):
        x = torch.tensor([0.7, -0.2]).requires_grad_()
        results = call(x)
        try:
            return [g.tolist() for g in torch.autograd.grad([results[i].sum() for i in which], [x], allow_unused=True) if g is not None]
        except RuntimeError as e:
            return str(e).partition("[")[0]
    compiled = vitrify.compile(f)
    for _ in range(2):
        assert outcome(compiled) == outcome(f)
