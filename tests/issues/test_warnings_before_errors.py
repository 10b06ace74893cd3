"""A hook on saved tensors raises in a call that has warned: the warning was given with the error set, and a SystemError came of both. Checkpoints stop so what they compute again."""
import warnings

import pytest
import torch
import vitrify
from torch.utils.checkpoint import checkpoint


def test_a_checkpoint():
    def told(compile):
        w, seen = torch.tensor([[0.5, 1.0]], requires_grad=True), []
        f = compile(lambda x: ((x * w).sin() * x, w.amax(-1).var(-1)))
        with warnings.catch_warnings(record=True) as log:
            warnings.simplefilter("always")
            for k in range(3):
                w.grad = None
                y, v = checkpoint(f, torch.full((2,), 1.0 + k), use_reentrant=False)
                y.sum().backward()
                seen.append((y.tolist(), v.isnan().item(), w.grad.tolist()))
        return seen, {str(one.message).partition(".")[0] for one in log if issubclass(one.category, UserWarning)}
    (ours, said), (eager, eager_said) = told(vitrify.compile), told(lambda f: f)
    torch.testing.assert_close(ours, eager)
    assert said == eager_said


@pytest.mark.eager("hooks on saved tensors", some=True)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_hook(error):
    def refuse(t):
        raise error("no")
    w = torch.tensor([[0.5, 1.0]], requires_grad=True)
    f = vitrify.compile(lambda x: ((x * w).sin() * x, w.amax(-1).var(-1)))
    with pytest.warns(UserWarning, match="degrees of freedom"):
        f(torch.ones(2))
    for pack in (refuse, vitrify.mark_lossless(refuse)):
        with pytest.raises(error, match="no"), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            f(torch.ones(2))
    f(torch.ones(2))[0].sum().backward()
