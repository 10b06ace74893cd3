"""What a call of a compiled program finds or leaves around it, as eager: hooks of all modules, defaults, containers, objects."""
import collections
import dataclasses
import functools

import expects
import pytest
import torch
import vitrify
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook


def beside(run):
    ours, eager = run(vitrify.compile), run(lambda f: f)
    assert ours == eager
    return ours


def watched(module, seen):
    module.register_full_backward_hook(lambda *a: seen.append("own"))
    return module


@pytest.mark.eager("registers a gradient hook")
def test_hooks_of_all_modules():
    def run(of):
        seen = []
        m = watched(nn.Linear(3, 3), seen)
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, result: seen.append("all"))
        try:
            f = of(m)
            for _ in range(3):
                f(torch.ones(2, 3, requires_grad=True)).sum().backward()
        finally:
            handle.remove()
        return seen
    assert beside(run).count("all") == 3


@pytest.mark.eager("registers a gradient hook")
def test_a_hook_that_is_always_called():
    class Refuses(nn.Module):
        def forward(self, x):
            if x.shape[0] == 5:
                raise ValueError("no")
            return x * 2

    def run(of):
        seen = []
        m = watched(Refuses(), seen)
        m.register_forward_hook(lambda module, args, result: seen.append(result is None), always_call=True)
        f = of(m)
        for n in (2, 2, 5, 2):
            try:
                f(torch.ones(n, 3, requires_grad=True)).sum().backward()
            except ValueError as e:
                seen.append(str(e))
        return seen
    assert "no" in beside(run)


@pytest.mark.eager("it writes Python state")
def test_a_call_of_the_users():
    def run(of):
        seen = []
        m = watched(nn.Linear(3, 3), seen)
        m._call_impl = lambda x: (seen.append("mine"), x * 3)[1]
        f, x = of(m), torch.ones(2, 3, requires_grad=True)
        f(x).sum().backward()
        return seen, x.grad.tolist()
    assert "mine" in beside(run)[0]


@pytest.mark.eager("it writes Python state")
def test_hooks_of_all_optimizers():
    def run(of):
        p, seen = nn.Parameter(torch.ones(3)), []
        step = of(torch.optim.SGD([p], 0.5).step)
        p.grad = torch.ones(3)
        step()
        step()
        handle = register_optimizer_step_pre_hook(lambda *a: seen.append(1))
        try:
            step()
        finally:
            handle.remove()
        return seen, p.tolist()
    assert beside(run)[0] == [1]


def test_what_makes_the_values_of_a_container():
    class Makes:
        k = 3.0

        def __call__(self):
            return self.k

    def run(of):
        makes = Makes()
        table = collections.defaultdict(makes)
        f, told = of(lambda x: x * table.default_factory()), []
        for k in (3.0, 3.0, 5.0):
            makes.k = k
            told.append(f(torch.ones(3)).tolist())
        return told
    assert beside(run)[2] == [5.0] * 3


@pytest.mark.eager("it changes the default device")
def test_the_default_device():
    def sets(x):
        torch.set_default_device("meta")
        return x * 2

    def run(of):
        f, left = of(sets), []
        for _ in range(3):
            try:
                f(torch.ones(3, device="cpu"))
                left.append(str(torch.get_default_device()))
            finally:
                torch.set_default_device(None)
        return left
    assert beside(run) == ["meta"] * 3


@dataclasses.dataclass
class Holds:
    a: torch.Tensor


@pytest.mark.eager("the result is an object of type Holds")
def test_more_attributes_than_fields():
    def gives(x):
        d = Holds(x * 2)
        d.extra = 3
        return d

    def run(of):
        f = of(gives)
        return [vars(f(torch.ones(3)))["extra"] for _ in range(3)]
    assert beside(run) == [3] * 3


def test_more_attributes_of_an_argument():
    def run(of):
        f, told = of(lambda d: d.a * d.extra), []
        for k in (2, 2, 5):
            d = Holds(torch.ones(2))
            d.extra = k
            told.append(f(d).tolist())
        return told
    assert beside(run)[2] == [5.0, 5.0]


def test_the_sign_of_a_rate():
    def run(of):
        groups, told = torch.optim.SGD([nn.Parameter(torch.ones(3))], 0.1).param_groups, []
        f = of(lambda x: torch.copysign(x, torch.full_like(x, abs(groups[0]["lr"]))))
        for rate in (0.1, 0.2, -0.0, 0.0, -0.3):
            groups[0]["lr"] = rate
            told.append(f(torch.ones(2)).tolist())
        return told
    beside(run)


def popped(ctx):
    ctx.by = [3.0, 2.0, 1.0].pop


def counted(ctx):
    box = [1.0]
    ctx.by = functools.partial(lambda b: b.__setitem__(0, b[0] + 1) or b[0], box)


@pytest.mark.parametrize("hold", [popped, counted])
def test_what_a_context_calls(hold):
    expects.eager("changes attributes of its ctx" if hold is popped else "Changes may write in its backward")

    class Changes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            hold(ctx)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * ctx.by()

    def run(of):
        f, told = of(lambda x: Changes.apply(x) + 1), []
        for _ in range(2):
            x = torch.ones(3, requires_grad=True)
            y = f(x)
            told += [torch.autograd.grad(y.sum(), x, retain_graph=True)[0].tolist() for _ in range(3)]
        return told
    beside(run)
