"""Checkpoints run their functions again in the backward: what those find is as it is by then, and needs gradients as it does by then."""
import pytest
import torch
import vitrify
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.way = nn.Linear(3, 3).double(), nn.Linear(3, 3).double(), way
        self.drop = nn.Dropout(0.5)
        self.register_buffer("s", torch.linspace(0.5, 1.5, 3, dtype=torch.float64))

    def inner(self, x):
        return torch.tanh(self.drop(self.a(x))) * self.s

    def forward(self, x):
        x = self.b(x)
        if self.way == "one":
            return checkpoint(self.inner, x, use_reentrant=False)
        if self.way == "two":
            return checkpoint(self.inner, checkpoint(self.inner, x, use_reentrant=False) * 2, use_reentrant=False)
        y = checkpoint(lambda x: checkpoint(self.inner, x, use_reentrant=False) * 2, x, use_reentrant=False)
        return y + checkpoint(self.inner, y * 2, use_reentrant=False) if self.way == "beside" else y


WAYS = ["one", "two", "in another", "beside"]


def thaw(m):
    m.a.bias.requires_grad_(True)


def freeze(m):
    m.a.weight.requires_grad_(False)


def thaw_buffer(m):
    m.s.requires_grad_(True)


def write_buffer(m):
    m.s.mul_(2)


def write_weight(m):
    with torch.no_grad():
        m.a.weight.mul_(2)


def replace(m):
    m.a.weight = nn.Parameter(m.a.weight.detach() * 2)


def replace_buffer(m):
    m.s = m.s * 3


def evaluate(m):
    m.eval()


def all_of_it(m):
    for f in (thaw, thaw_buffer, replace, evaluate):
        f(m)


def outcome(make, way, between, steps=3, backward=lambda y: y.sum().backward()):
    m = Net(way)
    f, out = make(m), []
    for step in range(steps):
        m.train()
        m.s = m.s.detach().requires_grad_(False) if between in (thaw_buffer, all_of_it) and step == 0 else m.s
        m.s.requires_grad_(False)
        m.a.requires_grad_(True)
        m.a.bias.requires_grad_(False)
        for p in (*m.parameters(), m.s):
            p.grad = None
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
        torch.manual_seed(step)
        y = f(x)
        if step:
            between(m)
        try:
            backward(y)
        except CheckpointError:  # dropout that draws no more, or a weight that is not saved
            out.append([None])
            continue
        out.append([y.detach().clone()] + [None if t.grad is None else t.grad.clone() for t in (x, *m.parameters(), m.s)])
    return out


def same(a, b):
    for one, other in zip(a, b, strict=True):
        for t, u in zip(one, other, strict=True):
            assert (t is None) == (u is None)
            if t is not None:
                torch.testing.assert_close(t, u)
                assert t.stride() == u.stride()


BETWEEN = [thaw, freeze, thaw_buffer, write_buffer, write_weight, replace, replace_buffer, evaluate, all_of_it]


@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.eager("op by op: what they read is changed", some=True)
def test_what_has_changed_since_the_forward(way, between):
    """Gradients were missing or placeholders, and eager's backward did not raise where this did."""
    expected = outcome(lambda m: m, way, between)
    same(outcome(lambda m: vitrify.compile(m, fullgraph=True), way, between), expected)
    assert vitrify.counters["eager_calls"] == 0


def refusal(way, between):
    """The error of the backward, and the gradients that it has left."""
    m = Net(way)
    m.p = 0.5
    m.inner = lambda x: torch.tanh(nn.functional.dropout(m.a(x), m.p)) * m.s
    f = vitrify.compile(m, fullgraph=True)
    x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    y = f(x)
    between(m)
    with pytest.raises(RuntimeError) as e:
        y.sum().backward()
    return str(e.value), [t.grad for t in (x, *m.parameters())]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.eager("op by op: what they read is changed", some=True)
def test_draws_by_another_probability(way):
    """The mask was that of the forward."""
    def between(m):
        m.p = 0.9
    error, grads = refusal(way, between)
    assert "draws" in error and "before the call" in error and all(g is None for g in grads)


def test_a_second_forward_writes_what_the_first_has_read():
    """Eager reads what is there in the backward."""
    def outcome(make):
        m = Net("one")

        def f(x):
            with torch.no_grad():
                m.s.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return checkpoint(lambda x: torch.tanh(m.a(x)) * m.s, x, use_reentrant=False)
        f, out = make(f), []
        for k in range(3):
            x = torch.linspace(-1, k, 6, dtype=torch.float64).view(2, 3).requires_grad_()
            first, second = f(x), f(x * 2)
            first.sum().backward()
            second.sum().backward()
            out += [x.grad, m.a.weight.grad.clone(), m.s.clone()]
        return out
    for ours, eager in zip(outcome(lambda f: vitrify.compile(f, fullgraph=True)), outcome(lambda f: f), strict=True):
        torch.testing.assert_close(ours, eager)
    assert vitrify.counters["eager_calls"] == 0 and vitrify.counters["fallbacks"] == 0
