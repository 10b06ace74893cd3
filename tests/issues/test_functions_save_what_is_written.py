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
    elif when == "between" and reads:
        expects.eager("in its backward alone")
    expected = run(program)
    given = run(vitrify.compile(program))
    assert torch.equal(given, expected) if isinstance(expected, torch.Tensor) else given == expected
