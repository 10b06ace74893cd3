"""A formula of the user's that chooses what it reads by which of the results have a gradient."""
import sys
from pathlib import Path

import pytest
import torch
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from gradients import check, leaves, only  # noqa: E402


class Chooses(torch.autograd.Function):
    """With both gradients it reads y alone, with the first x, with the second z."""

    @staticmethod
    def forward(ctx, x, y, z):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y, z)
        return x * y, x + z

    @staticmethod
    def backward(ctx, a, b):
        x, y, z = ctx.saved_tensors
        if a is None:
            return b * z, None, b * z.exp()
        if b is None:
            return a * x, a * x.sin(), None
        return a * y + b, a * y, b


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
@pytest.mark.parametrize("used", [(0,), (1,), (0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("inner", [False, True], ids=["alone", "within"])
def test_it_reads_something_else_for_some_of_the_results(used, inner):
    fn = (lambda x, y, z: tuple(t.sin() for t in Chooses.apply(x.exp(), y * 2, z.cos()))) if inner else Chooses.apply
    check(fn, leaves((3, 4), (3, 4), (3, 4)), then=only(*used), native="forward")
