"""Hooks on saved tensors may round what they are given, or change its type: they were given something else than eager saves."""
import contextlib

import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

HOOKS = {
    "half": (lambda t: t.half(), lambda t: t.double()), "half again": (lambda t: (t.half(), t.dtype), lambda p: p[0].to(p[1])),
    "single": (lambda t: t.float(), lambda t: t), "scaled": (lambda t: t * 2, lambda t: t), "halved": (lambda t: t, lambda t: t / 2),
    "zero": (lambda t: t, torch.zeros_like), "the mean": (lambda t: t.float().mean().expand(t.shape), lambda t: t), "the same": (lambda t: t, lambda t: t),
}


PROGRAMS = {
    "dropout": lambda x, w: F.dropout(x * w, 0.3).sin(), "relu": lambda x, w: F.relu(x * w) * 2, "layers": lambda x, w: F.dropout(F.relu(x @ w), 0.3) @ w,
    "masked": lambda x, w: x.masked_fill(w > 0, 0.0) * w, "where": lambda x, w: torch.where(x > 0, x * w, w), "norm": lambda x, w: F.layer_norm(x, (80,)) * w,
    "clamp": lambda x, w: x.clamp(-0.5, 0.5) * w.clamp(min=0), "chain": lambda x, w: ((x * w).exp().sin() * w).tanh().cos(), "maximum": lambda x, w: (x * w).max(1)[0],
}
def once(y, x, w):
    (y * y).sum().backward()
    return x.grad, w.grad


def twice(y, x, w):
    y.sum().backward(retain_graph=True)
    first = x.grad.clone()
    (y * y).sum().backward()
    return first, x.grad, w.grad


def again(y, x, w):
    first = torch.autograd.grad((y * y).sum(), (x, w), create_graph=True)
    return *first, *torch.autograd.grad(first[0].square().sum() + first[1].sum(), (x, w), allow_unused=True)


def in_part(y, x, w):
    return *torch.autograd.grad((y * y).sum(), x, retain_graph=True), *torch.autograd.grad(y.sum(), w)


def outcome(f, hooks, how, n=80):
    torch.manual_seed(0)
    x, w = (torch.randn(n, 80, dtype=torch.float64) / 3 for _ in range(2))
    x.requires_grad_(), w.requires_grad_()
    with hooks:
        y = f(x, w)
    try:
        return [y.detach(), *(t.detach() for t in how(y, x, w) if t is not None)]
    except (RuntimeError, IndexError) as e:
        return repr(e)


def same(program, hooks, how, **options):
    compiled = vitrify.compile(program, **options)
    for _ in range(2):
        ours, eager = (outcome(g, saved_tensors_hooks(*hooks), how) for g in (compiled, program))
        assert ours == eager if isinstance(eager, str) else torch.testing.assert_close(ours, eager) is None


HOW = pytest.mark.parametrize("how", [once, twice, again, in_part], ids=lambda f: f.__name__)


@HOW
@pytest.mark.parametrize("hooks", ["half", "scaled", "zero", "the same"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_around_the_call(name, hooks, how):
    """What a call keeps for its backward is less than what eager saves, and other values: hooks of others are given what eager gives them."""
    expects.eager("hooks on saved tensors, which may give back something else")
    same(PROGRAMS[name], HOOKS[hooks], how)


def test_calls_with_hooks_and_without():
    """Those of torch give back what they are given."""
    expects.eager("hooks on saved tensors, which may give back something else")
    compiled, f = vitrify.compile(PROGRAMS["layers"]), PROGRAMS["layers"]
    lossless = vitrify.mark_lossless(lambda t: t.clone()), lambda t: t
    for hooks, compiles in [(contextlib.nullcontext(), True), (saved_tensors_hooks(*HOOKS["half"]), False), (save_on_cpu(), True), (contextlib.nullcontext(), True),
                            (saved_tensors_hooks(*HOOKS["zero"]), False), (saved_tensors_hooks(*lossless), True)]:
        before = dict(vitrify.counters)
        torch.testing.assert_close(*(outcome(g, hooks, once) for g in (compiled, f)))
        assert (vitrify.counters["compiled_calls"] > before["compiled_calls"]) == compiles


@pytest.mark.no_kernels("it refuses what it is given")
def test_a_mark_on_no_function():
    with pytest.raises(vitrify.OptionError, match="pack is expected to be a function of a tensor, not int"):
        vitrify.mark_lossless(3)


DRAWS = {"noise": lambda t: t + torch.randn(t.shape), "dropout": lambda t: F.dropout(t, 0.5), "for nothing": lambda t: (torch.rand(1), t)[1]}


@pytest.mark.parametrize("forgets", [True, False], ids=["gives once", "keeps"])
@HOW
@pytest.mark.parametrize("draw", DRAWS)
def test_hooks_of_the_program_that_draw(draw, how, forgets):
    expects.eager("hooks on saved tensors draw random numbers")

    def f(x, w):
        held = {}

        def pack(t):
            held[len(held)] = t.detach().clone()
            return len(held) - 1
        with saved_tensors_hooks(pack, lambda n: DRAWS[draw](held.pop(n) if forgets else held[n])):
            return (x * w).sin()
    compiled = vitrify.compile(f)
    for _ in range(2):
        results = []
        for g in (compiled, f):
            try:
                results.append(outcome(g, contextlib.nullcontext(), how))
            except KeyError as e:
                results.append(repr(e))
        assert results[0] == results[1] if isinstance(results[1], str) else torch.testing.assert_close(*results) is None
