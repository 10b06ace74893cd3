"""Reentrant checkpoints run their functions without gradients in the forward and with them in the backward, which goes to the leaves by itself: no one graph says both. Eager runs them."""
import contextlib
import warnings

import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

REASON = "a reentrant checkpoint"


def reentrant(f, *args, **how):
    return checkpoint(f, *args, use_reentrant=True, **how)


class CountsOnce(nn.BatchNorm1d):
    def forward(self, x):
        if torch.is_grad_enabled():  # computed again: the statistics have seen it
            return F.batch_norm(x, None, None, self.weight, self.bias, True)
        return super().forward(x)


class Net(nn.Module):
    def __init__(self, norm=nn.Identity):
        super().__init__()
        self.a, self.b, self.norm, self.table = nn.Linear(4, 4), nn.Linear(4, 4), norm(4), nn.Embedding(8, 4, sparse=True)
        self.log = []

    def block(self, x):
        return self.norm(self.a(x)).relu()


def hooked(m):
    """Eager's inner backwards accumulate each by itself."""
    m.a.weight.register_hook(lambda g: (m.log.append(g.clone()), g.clamp(-0.1, 0.1))[1])
    m.a.weight.register_post_accumulate_grad_hook(lambda p: m.log.append(p.grad.clone()))


def freeze(m):
    m.a.bias.requires_grad_(False)
    m.table.weight.requires_grad_(False)


def thaw(m):
    m.a.bias.requires_grad_(True)
    m.table.weight.requires_grad_(True)


def keeps(m):
    pass


PROGRAMS = {  # the program, what is done before it, and what between it and the backward
    "plain": (lambda m, x: reentrant(m.block, m.b(x)), keeps, keeps),
    "in another": (lambda m, x: checkpoint(lambda x: reentrant(m.block, m.b(x)), x, use_reentrant=False), keeps, keeps),
    "another in it": (lambda m, x: reentrant(lambda x: checkpoint(m.block, x, use_reentrant=False) * 2, m.b(x)), keeps, keeps),
    "a shared leaf with hooks": (lambda m, x: reentrant(m.block, reentrant(m.block, x) * 2) + m.a(x), hooked, keeps),
    "asks for the mode": (lambda m, x: reentrant(m.block, m.b(x)), keeps, keeps),
    "asks what needs gradients": (lambda m, x: reentrant(lambda x: m.a(x) * (2 if m.a(x).requires_grad else 3), x), keeps, keeps),
    "a leaf that thaws": (lambda m, x: reentrant(m.block, x), freeze, thaw),
    "a sparse embedding": (lambda m, x: reentrant(lambda x: m.table(torch.tensor([1, 3, 3])) * x.sum(), x), keeps, keeps),
    "a sparse embedding that thaws": (lambda m, x: reentrant(lambda x: m.table(torch.tensor([1, 3, 3])) * m.a(x)[:3], x), freeze, thaw),
    "dropout": (lambda m, x: F.dropout(reentrant(lambda x: F.dropout(m.block(x), 0.5), x), 0.3), keeps, keeps),
    "draws that are not put back": (lambda m, x: reentrant(lambda x: F.dropout(m.block(x), 0.5), x, preserve_rng_state=False), keeps, keeps),
    "two results": (lambda m, x: reentrant(lambda x, k: (m.a(x) * k, m.b(x).tanh()), x, 2.5)[1], keeps, keeps),
    "what it finds has a history": (lambda m, x: (lambda h: reentrant(lambda x: m.a(x) * h, x))(x.sin()), keeps, keeps),
    "in sequence": (lambda m, x: checkpoint_sequential(nn.Sequential(m.a, nn.ReLU(), m.b), 3, x, use_reentrant=True), keeps, keeps),
}


def trained(make, name, steps=3):
    program, before, between = PROGRAMS[name]
    torch.manual_seed(0)
    m, seen = Net(CountsOnce if name == "asks for the mode" else nn.Identity), []
    f = make(lambda x: program(m, x) * 2)
    if before is hooked:
        hooked(m)
    for _ in range(steps):
        if before is not hooked:
            before(m)
        x = torch.randn(5, 4, requires_grad=True)
        y = f(x)
        between(m)
        try:
            y.square().sum().backward()
        except RuntimeError as e:
            seen.append(str(e).partition("\n")[0])
        with torch.no_grad():
            for p in m.parameters():
                if p.grad is not None:
                    p -= 0.1 * (p.grad.to_dense() if p.grad.is_sparse else p.grad)
        seen += [y.detach(), x.grad, *(p.grad.clone() if p.grad is not None else None for p in m.parameters()), torch.get_rng_state()]
    return seen + m.log + list(m.buffers())


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_eager_gives(name):
    """Also what its hooks have seen, and how often; the reason is said once."""
    expects.eager(REASON)
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        ours = trained(vitrify.compile, name)
    eager = trained(lambda f: f, name)
    assert len(ours) == len(eager)
    for a, b in zip(ours, eager, strict=True):
        if not isinstance(b, torch.Tensor):
            assert type(a) is type(b) and a == b
        else:
            assert a.layout == b.layout and torch.equal(a.to_dense() if a.is_sparse else a, b.to_dense() if b.is_sparse else b)
    said = [str(w.message) for w in log if issubclass(w.category, vitrify.VitrifyWarning)]
    assert len(said) == 1 and REASON in said[0] and "use_reentrant=False compiles" in said[0], said
    assert vitrify.counters["eager_calls"] == 3


@pytest.mark.no_kernels("the capture fails")
def test_the_whole_graph_is_asked_for():
    with pytest.raises(vitrify.CaptureError, match="a reentrant checkpoint .* use_reentrant=False compiles"):
        vitrify.compile(lambda x: reentrant(torch.sin, x), fullgraph=True)(torch.ones(3, requires_grad=True))


def test_what_its_function_raises():
    """As eager does, with the hooks around the call still there."""
    expects.no_kernels("the program raises")

    def inside(v):
        raise ValueError("as eager")
    before = torch._C._autograd._top_saved_tensors_default_hooks(True)
    with warnings.catch_warnings(), pytest.raises(ValueError, match="as eager"):
        warnings.simplefilter("ignore", vitrify.VitrifyWarning)
        vitrify.compile(lambda x: reentrant(inside, x))(torch.ones(3, requires_grad=True))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is before


def test_grad_is_refused_as_eager_refuses_it():
    expects.eager(REASON)
    errors = []
    for f in (vitrify.compile(lambda x: reentrant(torch.sin, x)), lambda x: reentrant(torch.sin, x)):
        x = torch.ones(3, requires_grad=True)
        with warnings.catch_warnings(), pytest.raises(RuntimeError, match="incompatible with .grad") as e:
            warnings.simplefilter("ignore", vitrify.VitrifyWarning)
            torch.autograd.grad(f(x).sum(), x)
        errors.append(str(e.value))
    assert errors[0] == errors[1]


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("grad", [True, False])
def test_without_gradients_it_compiles(grad):
    """Nothing needs them, or they are off."""
    torch.manual_seed(0)
    m = Net()
    f = lambda x: reentrant(m.block, x) * 2  # noqa: E731
    with contextlib.nullcontext() if grad else torch.no_grad():
        x = torch.randn(5, 4, requires_grad=not grad)
        ours, eager = vitrify.compile(f, fullgraph=True)(x), f(x)
    torch.testing.assert_close(ours, eager)
    assert not ours.requires_grad and not eager.requires_grad
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["eager_calls"] == 0
