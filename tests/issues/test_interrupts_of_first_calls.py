"""Ctrl-C within the first call of a program that has by then changed what it can reach: the call has not been, nothing of the capture stays, and the next calls are right."""
import contextlib
import functools
import random

import expects
import pytest
import torch
import torch.utils.checkpoint
import vitrify
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.n, self.box, self.stop, self.d = nn.Linear(2, 2), 0, [], True, {"a": 1}
        self.register_buffer("b", torch.zeros(2))


class Reads(Net):
    def forward(self, x):
        self.l.weight.requires_grad_(False)
        y = self.l(x) + cached(3) + torch.rand(2)
        if self.stop:
            raise KeyboardInterrupt
        return y * 2


class Writes(Net):
    def forward(self, x):
        self.n += 1
        self.d["a"] += 1
        self.box.append(self.n)
        self.last = x * 2
        self.b.add_(1)
        y = self.l(x) * self.n
        random.random()
        torch.manual_seed(5)
        if self.stop:
            torch.set_grad_enabled(False)
            raise KeyboardInterrupt
        return y


class Data(Net):
    def forward(self, x):
        self.l.bias.data = self.l.bias.data + 1
        self.l.bias.note = "seen"
        if self.stop:
            raise KeyboardInterrupt
        return self.l(x)


@functools.lru_cache
def cached(k):
    return torch.full((1,), float(k))


def value(t):
    return "a placeholder" if vitrify._C.is_fake(t) else t.tolist()


def state(m):
    return {"attributes": (m.n, m.d, list(m.box), value(m.last) if hasattr(m, "last") else None), "buffer": value(m.b), "cache": value(cached(3)),
            "parameters": [(value(p), value(p.data), p.requires_grad, getattr(p, "note", None)) for p in m.parameters()],
            "modes": (torch.is_grad_enabled(), torch.compiler.is_compiling(), vitrify._C.capturing()), "random": (random.getstate(), torch.get_rng_state().tolist())}


def begin(cls):
    torch.manual_seed(0)
    random.seed(0)
    cached.cache_clear()
    return cls()


def goes_on(m, f):
    m.stop = False
    x = torch.ones(1, 2)
    return [*[f(x).tolist() for _ in range(3)], state(m)]


@pytest.mark.parametrize("cls", [Reads, Writes, Data], ids=lambda cls: cls.__name__)
def test_a_module(cls):
    expects.eager({Reads: "it changes the requires_grad of a tensor", Writes: "sets the state of a random number generator", Data: "it looks into the memory of a tensor"}[cls])
    m = begin(cls)
    want = goes_on(m, m)
    m = begin(cls)
    f, before = vitrify.compile(m), state(m)
    cached.cache_clear()
    try:
        with pytest.raises(KeyboardInterrupt):
            f(torch.ones(1, 2))
        assert state(m) == before
    finally:
        torch.set_grad_enabled(True)
    assert goes_on(m, f) == want


@pytest.mark.eager("it writes Python state, as caches do at first")
def test_a_step_of_an_optimizer():
    """Its numbers are symbols while it is captured."""
    class SGD(torch.optim.SGD):
        stop = False

        def step(self):
            super().step()
            if self.stop:
                raise KeyboardInterrupt

    def steps(compiled):
        p = nn.Parameter(torch.ones(2))
        o = SGD([p], lr=0.5, momentum=0.9)
        p.grad, o.stop = torch.ones(2), compiled
        step = vitrify.compile(o.step) if compiled else o.step
        if compiled:
            with pytest.raises(KeyboardInterrupt):
                step()
        groups = [{k: (type(v), v) for k, v in g.items() if k != "params"} for g in o.param_groups]
        o.stop = False
        for _ in range(3):
            step()
        return groups, p.tolist(), [value(s["momentum_buffer"]) for s in o.state.values()]
    assert steps(True) == steps(False)


@pytest.mark.eager("hooks", some=True)
@pytest.mark.parametrize("around", [torch.autograd.graph.save_on_cpu, contextlib.nullcontext], ids=["hooks", "none"])
def test_within_a_checkpoint(around):
    """What its frames hold takes hooks off a stack when it ends: by then they are as they were before."""
    stop = [True]

    def part(a, b):
        if stop[0]:
            raise KeyboardInterrupt
        return (a * b).sin()
    x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    compiled = vitrify.compile(lambda x, w: torch.utils.checkpoint.checkpoint(part, x, w, use_reentrant=False))
    with around():
        with pytest.raises(KeyboardInterrupt):
            compiled(x, w)
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        assert (hooks is not None) == (around is not contextlib.nullcontext)
    stop[0] = False
    got, = torch.autograd.grad(compiled(x, w).sum(), x)
    torch.testing.assert_close(got, 2 * torch.full((3,), 2.0).cos())
