"""Parts of one derivative read what the forward has saved one after the other. Hooks that give a tensor once were asked by each, and a checkpoint around a call refused the second."""
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(8, 8).double() for _ in range(3))

    def forward(self, x):
        x = F.layer_norm(x, (8,)).tanh()
        return self.q(x), self.k(x), self.v(x)


PROGRAMS = {
    "waves": lambda: (lambda x: (x.sin(), x.cos())), "projections": Projections, "moments": lambda: (lambda x: (x.mean(0), x.square().mean(0), x.exp())),
    "one behind another": lambda: (lambda x: (lambda y: (y, y.sin() * x, (y * x).cos()))(x.exp())),
}


class Once:
    """Hooks that move a tensor out, and forget it when they give it back."""

    def __init__(self):
        self.held = {}

    def pack(self, t):
        self.held[len(self.held)] = t.detach().clone()
        return len(self.held) - 1

    def unpack(self, n):
        t, self.held[n] = self.held[n], None
        assert t is not None, "given back a second time"
        return t


def steps(f, how, dims):
    """Gradients of a few calls: other sizes, results used in part."""
    seen = []
    for n in dims:
        x = torch.linspace(-1, 2, 8 * n, dtype=torch.float64).view(n, 8).requires_grad_()
        if how == "checkpoint":
            out = checkpoint(f, x, use_reentrant=False)
        else:
            once = Once()
            with saved_tensors_hooks(once.pack, once.unpack):
                out = f(x)
        for use in (out, out[1:]) if how == "checkpoint" else (out,):
            loss = sum(t.square().sum() for t in use)
            seen += torch.autograd.grad(loss, x, retain_graph=how == "checkpoint")
    return seen


@pytest.mark.parametrize("dims", [(4, 4), (4, 5, 6)], ids=str)
@pytest.mark.parametrize("how", ["checkpoint", "hooks"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_read_what_hooks_give_once(name, how, dims):
    for ours, eager in zip(steps(vitrify.compile(PROGRAMS[name]()), how, dims), steps(PROGRAMS[name](), how, dims), strict=True):
        torch.testing.assert_close(ours, eager)


def test_what_hooks_gave_is_let_go_of():
    f, once = vitrify.compile(lambda x: (x.sin(), x.cos())), Once()
    x = torch.randn(1000, requires_grad=True)
    with saved_tensors_hooks(once.pack, once.unpack):
        a, b = f(x)
    import weakref
    given = [weakref.ref(t) for t in once.held.values()]
    (a.sum() + b.sum()).backward()
    assert given and all(ref() is None for ref in given)
