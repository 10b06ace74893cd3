"""What a Function saves of what the program reaches by itself and writes: its backward looks at its version, whatever it reads of it."""
import expects
import pytest
import torch
import vitrify
from torch import nn


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, reads):
        ctx.save_for_backward(a, b)
        ctx.reads = reads
        return a * 2

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        return g * b if ctx.reads else g * 2, None, None


@pytest.mark.parametrize("when", ["before", "after", "between"])
@pytest.mark.parametrize("reads", [False, True])
def test_versions(reads, when):
    c, w = torch.ones(3), nn.Parameter(torch.ones(3))

    def program():
        if when == "before":
            c.add_(1)
        made = Keeps.apply(w, c, reads)
        if when == "after":
            c.add_(1)
        return made * 3

    def run(f):
        first = f()
        f()
        if when == "between":
            c.add_(1)
        try:
            return torch.autograd.grad(first.sum(), w)[0]
        except RuntimeError as e:
            return str(e).partition(" is at version")[0]
    if when == "after":
        expects.eager("has been modified by an inplace operation")
    expected = run(program)
    given = run(vitrify.compile(program))
    assert torch.equal(given, expected) if isinstance(expected, torch.Tensor) else given == expected


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx, g):
        a, = ctx.saved_tensors
        return 2 * g * a


NOWHERE = {
    "alone": lambda t, x: (v := t * 2, Squared.apply(v).sum()), "twice": lambda t, x: (v := t * 2, Squared.apply(Squared.apply(v)).sum()), "beside another": lambda t, x: (v := t * 2, (Squared.apply(v) * x).sum()),
}


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("program", NOWHERE)
def test_its_gradient_leads_nowhere(program, needs_grad, written):
    """A view that was made without gradients needs one and gets none: eager's backward comes to the Function all the same."""
    said = []
    for make in (vitrify.compile, lambda f: f):
        w, x = nn.Parameter(torch.ones(2, 3)), torch.ones(1, 3, requires_grad=needs_grad)
        with torch.no_grad():
            t = w[1:]
        f = make(lambda x: NOWHERE[program](t, x))  # noqa: B023
        for _ in range(2):
            v, out = f(x)
            if written:
                v.mul_(2)
            try:
                out.backward()
                said.append("no error")
            except RuntimeError as e:
                said.append(str(e).partition(" [")[0])
        said.append((w.grad is None, written or x.grad is None))
    assert said[:3] == said[3:]
    assert ("no error" in said) != written
