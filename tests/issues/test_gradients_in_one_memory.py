"""A leaf adds to its .grad in place: where a call gives a tangent to one leaf and a view of it to another, the first has a copy, as in eager. They counted each other's gradients."""
import pytest
import torch
import vitrify
from torch import nn

SUMS = {"view": lambda w, b: w.view(-1) + b, "sin": lambda w, b: (w.view(-1) + b).sin(), "product": lambda w, b: (w.view(-1) + b) * 2, "turned": lambda w, b: b + w.view(-1), "unsqueezed": lambda w, b: (w[None] + b).exp(), "less": lambda w, b: w.view(-1) - b,
        "reshaped": lambda w, b: w.reshape(1, 3) + b, "transposed": lambda w, b: w[None].t() + b[:, None]}
BESIDE = {"nothing": lambda w, b: (), "b": lambda w, b: (b * 2,), "w": lambda w, b: (w * 2,), "both": lambda w, b: (w.exp(), b.exp())}
BACK = {"sum": lambda y: y[0].sum().backward(), "both": lambda y: (y[0].sum() + y[0].sin().sum()).backward(), "given": lambda y: y[0].backward(torch.arange(3.0).view(y[0].shape)), "all": lambda y: sum((t.sin() + t).sum() for t in y).backward(),
        "sin": lambda y: y[0].sin().sum().backward(), "kept": lambda y: y[0].sin().sum().backward(retain_graph=True)}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("first", [False, True], ids=["beside it behind", "beside it first"])
@pytest.mark.parametrize("back", BACK)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("name", SUMS)
def test_steps(name, beside, back, first):
    def told(compile):
        w, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))

        def program():
            made = BESIDE[beside](w, b) if first else None
            total = SUMS[name](w, b)
            return (total, *(made if first else BESIDE[beside](w, b)))
        f, seen = compile(program), []
        for _ in range(3):
            BACK[back](f())
            seen += [[round(x, 4) for x in t.grad.tolist()] for t in (w, b)]
        return seen, w.grad.data_ptr() == b.grad.data_ptr()
    assert told(lambda f: vitrify.compile(f, fullgraph=True)) == told(lambda f: f)
