"""Backward hooks of the module that is compiled run around its compiled forward."""
import warnings

import expects
import pytest
import torch
import vitrify
from compare import same
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, dtype=torch.double)

    def forward(self, x, scale=1.0):
        low = x.min()
        y = torch.addcmul(self.linear(x), low, low) * scale
        return low, y, torch.sqrt(torch.abs(x) + 1)


class One(Net):
    def forward(self, x):
        return torch.sqrt(torch.abs(self.linear(x)) + 1)


class Counts(Net):
    def forward(self, x):
        return torch.sqrt(torch.abs(x) + 1), (x > 0).sum(), x, self.linear(x.detach())


def leaf(seed=0):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.double).requires_grad_()


def copies(all):
    return [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in all]


def full(m, log):
    m.register_full_backward_hook(lambda n, gi, go: log.append((n is m, *copies(gi), *copies(go))))


def changes(m, log):
    m.register_full_backward_hook(lambda n, gi, go: tuple(None if g is None else g * 3 for g in gi))


def pre(m, log):
    m.register_full_backward_pre_hook(lambda n, go: tuple(None if g is None else g * 2 for g in go))


def forwards(m, log):
    full(m, log)
    m.register_forward_pre_hook(lambda n, args: (args[0] * 2,))
    m.register_forward_pre_hook(lambda n, args, kwargs: log.append((n is m, len(args), sorted(kwargs))), with_kwargs=True)
    m.register_forward_hook(lambda n, args, out: log.append(("forward", len(args))))
    m.register_forward_hook(lambda n, args, kwargs, out: tuple(o * 1 for o in out) if isinstance(out, tuple) else out * 5, with_kwargs=True)


HOOKS = {"full": full, "changes": changes, "pre": pre, "forwards": forwards}


def outputs(out):
    return [out] if isinstance(out, torch.Tensor) else list(out)


def told(out):
    """What eager's results show of how they were made."""
    def written(o):
        try:
            o.mul_(2)
        except RuntimeError as e:
            return str(e).partition(". ")[0]
    return [(o._is_view(), o.requires_grad, o.is_leaf, o._version, type(o.grad_fn).__name__, o._base is None) for o in out], [written(o) for o in out if o.requires_grad]


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("net", [Net, One, Counts])
@pytest.mark.parametrize("in_place", [False, True])
def test_as_eager(net, hooks, in_place):
    results = []
    for compiled in (False, True):
        m, log = net(), []
        HOOKS[hooks](m, log)
        f = m
        if compiled and in_place:
            vitrify.compile_(m)
        elif compiled:
            f = vitrify.compile(m)
        for k in range(3):
            x = leaf(k)
            out = outputs(f(x))
            sum((o * o.detach().cos()).sum() for o in out if o.requires_grad).backward(retain_graph=True)
            first = [x.grad.clone(), *(p.grad.clone() for p in m.parameters() if p.grad is not None)]
            again = torch.autograd.grad(sum(o.pow(2).sum() for o in out if o.requires_grad), x, create_graph=True)[0]
            second = torch.autograd.grad(again.pow(2).sum(), x)
            results.append((copies(out), told(out), first, again.detach(), second))
        results.append(log)
    half = len(results) // 2
    same(results[half:], results[:half])
    if net is not Counts:
        assert vitrify.counters["captures"] == 1


def test_registered_and_removed():
    """Without hooks the call has an entry of its own, which other calls keep."""
    m, log = One(), []
    f = vitrify.compile(m)
    f(leaf()).sum().backward()
    for k in range(3):
        handle = m.register_full_backward_hook(lambda n, gi, go: log.append(n is m))
        f(leaf()).sum().backward()
        assert log == [True] * (k + 1)
        handle.remove()
        f(leaf()).sum().backward()
        assert len(log) == k + 1
    assert vitrify.counters["captures"] <= 3 and vitrify.counters["eager_calls"] == 0


def test_hooks_change_and_nothing_is_captured_again():
    m, log = One(), []
    m.register_forward_hook(lambda n, args, out: log.append(0))
    f = vitrify.compile(m)
    for k in range(12):
        handle = m.register_full_backward_hook(lambda n, gi, go: log.append(k))
        f(leaf()).sum().backward()
        handle.remove()
    assert log == [v for k in range(12) for v in (0, k)] and vitrify.counters["captures"] == 1


def test_of_its_parts():
    """Hooks of other modules are of the program."""
    expects.eager("registers a gradient hook on a node")
    m, log = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double(), []
    m.register_full_backward_hook(lambda n, gi, go: log.append("all"))
    m[0].register_full_backward_hook(lambda n, gi, go: log.append("first"))
    with pytest.warns(vitrify.VitrifyWarning, match="hook"):
        vitrify.compile(m)(leaf()).sum().backward()
    assert log == ["first", "all"]


class Itself(nn.Module):
    def __init__(self, catches):
        super().__init__()
        self.linear, self.catches = nn.Linear(4, 4, dtype=torch.double), catches

    def forward(self, x, depth=2):
        if not depth:
            return self.linear(x)
        if not self.catches:
            return self(x, depth - 1).sin()
        try:
            return self(x, depth - 1).sin()
        except RuntimeError:
            return x


@pytest.mark.parametrize("catches", [False, True])
def test_module_that_calls_itself(catches):
    expects.eager("it is a module with hooks, and calls itself")
    m, log = Itself(catches), []
    m.register_forward_hook(lambda n, args, out: log.append("forward"))
    m.register_full_backward_hook(lambda n, gi, go: log.append("backward"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vitrify.compile(m)(leaf()).sum().backward()
    assert log == ["forward"] * 3 + ["backward"] * 3


class Reads(One):
    def forward(self, x):
        return x * (2 + len(self._forward_hooks))


def test_forward_that_reads_hooks():
    expects.eager("it reads hooks that run around it")
    m = Reads()
    m.register_full_backward_hook(lambda n, gi, go: None)
    f = vitrify.compile(m)
    with pytest.warns(vitrify.VitrifyWarning):
        assert torch.equal(f(leaf()), leaf() * 2)
    m.register_forward_hook(lambda n, args, out: None)
    assert torch.equal(f(leaf()), leaf() * 3)


def test_errors_of_hooks():
    for compiled in (False, True):
        m = One()
        m.register_full_backward_hook(lambda n, gi, go: (None, None))
        m.register_forward_pre_hook(lambda n, args, kwargs: 5 if kwargs else None, with_kwargs=True)
        f = vitrify.compile(m) if compiled else m
        with pytest.raises(RuntimeError, match="forward pre-hook must return None or a tuple of .new_args, new_kwargs., but got 5"):
            f(x=leaf())
        with pytest.raises(RuntimeError, match="Backward hook returned an invalid number of grad_input, got 2, but expected 1"):
            f(leaf()).sum().backward()


def test_func_within_hooks_on_saved_tensors():
    """Which torch.func refuses, of the program's caller too."""
    program = lambda x: torch.func.grad(lambda a: a.sin().sum())(x)
    compiled = vitrify.compile(program)
    torch.testing.assert_close(compiled(torch.ones(3)), program(torch.ones(3)))
    before = vitrify.counters["eager_calls"]
    for g in (program, compiled, compiled):
        with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), pytest.raises(RuntimeError, match="saved tensor hooks"):
            g(torch.ones(3))
    assert vitrify.counters["eager_calls"] == before + 2
