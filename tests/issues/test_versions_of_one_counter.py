"""Captured tensors that are parts of one have one version counter: a derivative that is captured later sets it back for a while, and left it so."""
import expects
import pytest
import torch
import vitrify
from torch import nn

DERIVATIVES = {
    "of one result": lambda f, x, w: torch.autograd.grad(f(x)[1].sum(), w),
    "create_graph": lambda f, x, w: torch.autograd.grad(torch.autograd.grad(f(x)[0].sum(), w, create_graph=True)[0].square().sum(), w),
    "batched": lambda f, x, w: torch.autograd.grad(f(x), w, [torch.ones(3, 2, 4), torch.ones(3, 2, 4)], is_grads_batched=True),
    "another layout": lambda f, x, w: torch.autograd.grad(f(x), w, [torch.ones(4, 2).t(), torch.ones(4, 2).t()]),
    "under autocast": lambda f, x, w: backward_under_autocast(f, x, w),
}


def backward_under_autocast(f, x, w):
    out = f(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.autograd.grad(out[0].sum(), w)


def outcome(run):
    try:
        return run()
    except RuntimeError as e:
        return str(e)[:250]


@pytest.mark.parametrize("written", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_captured_later(name, parts, written):
    seen = []
    for compiles in (False, True):
        base = torch.linspace(-1, 1, 16 * parts)
        w = [p.view(4, 4).detach().requires_grad_() for p in base.chunk(parts)]
        f = lambda x: ((x @ w[0]).sin() @ w[-1], (x @ w[1]).exp())  # noqa: B023
        f, x = vitrify.compile(f, fullgraph=True) if compiles else f, torch.ones(2, 4)
        told = list(f(x))
        with torch.no_grad():
            for i in written:
                w[i].sub_(0.01)
        mine = (x @ w[0]) @ w[1]  # of eager
        told += outcome(lambda: DERIVATIVES[name](f, x, w[1]))  # noqa: B023
        told += [t._version for t in w] + list(f(x))
        with torch.no_grad():
            w[1].mul_(3)
        told.append(outcome(lambda: torch.autograd.grad(mine.sum(), w[0])[0]))  # noqa: B023
        seen.append(told)
    same(*seen)


def same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a, b)
        else:
            assert a == b


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        mean, var = torch.ones(8).chunk(2)
        self.register_buffer("mean", mean), self.register_buffer("var", var)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))

    def forward(self, x):
        x = x @ self.weight
        y = (x - self.mean) / self.var.exp()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.var.mul_(0.9)
        return y.sin()


@pytest.mark.parametrize("order", [1, 2])
def test_buffers_that_the_program_writes(order):
    seen = []
    for compiles in (False, True):
        module = Running()
        f, told = vitrify.compile(module) if compiles else module, []
        for step in range(3):
            x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
            out = f(x)
            told.append(out.detach())
            grads = outcome(lambda: torch.autograd.grad(out.sum(), x, create_graph=order == 2))  # noqa: B023
            told += grads if isinstance(grads, tuple) else [grads]
            if order == 2 and isinstance(grads, tuple):
                told.append(outcome(lambda: torch.autograd.grad(grads[0].square().sum(), module.weight)[0]))  # noqa: B023
            told += [module.mean._version, module.var._version, module.mean.clone(), module.var.clone()]
        seen.append([t.detach() if isinstance(t, torch.Tensor) else t for t in told])
    same(*seen)


@pytest.mark.parametrize("written", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("viewed", [0, 1])
def test_leaves_with_views_are_written_under_no_grad(viewed, written):
    seen = []
    for compiles in (False, True):
        w = [nn.Parameter(t) for t in torch.linspace(-1, 1, 8).chunk(2)]

        def f(x):
            view = w[viewed][:2]  # noqa: B023
            with torch.no_grad():
                for i in written:
                    w[i].mul_(0.5)  # noqa: B023
            return (view * x).sin(), w[viewed] * 2  # noqa: B023
        f = vitrify.compile(f) if compiles else f
        told = []
        for _ in range(3):
            out = f(torch.ones(2))
            told += [t.detach().clone() for t in out] + [t._version for t in w]
            told += outcome(lambda: [g for g in torch.autograd.grad(out[0].sum() + out[1].sum(), w, allow_unused=True) if g is not None])  # noqa: B023
        seen.append(told)
    same(*seen)


WRITES = {
    "both": lambda x, w: (x.add_(1), w.mul_(2)), "what is captured": lambda x, w: w.mul_(2), "the argument": lambda x, w: x.mul_(2), "one by .data": lambda x, w: (w.mul_(2), x.data.mul_(0.5)), "in place of another": lambda x, w: (w.mul_(2), x.add_(w), w.add_(x)),
}


@pytest.mark.eager("it writes to one of two views of one tensor, beside gradients", some=True)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", WRITES)
def test_an_argument_of_one_call_has_the_counter_of_what_is_captured(name, first):
    """Its writes were told to the argument, also of later calls whose argument has a counter of its own."""
    seen = []
    for compiles in (False, True):
        mine, w = torch.ones(8).chunk(2)

        def f(x, a):
            WRITES[name](x, w)  # noqa: B023
            return a * w * x  # noqa: B023
        f = vitrify.compile(f, fullgraph=True) if compiles else f
        told = []
        for x in (mine, torch.ones(4), torch.ones(4), mine) if first else (torch.ones(4), mine, torch.ones(4), mine):
            a = torch.ones(4, requires_grad=True)
            saved = [(a * w).sum(), (a * x).sum()]
            before = x._version, w._version
            out = f(x, a)
            told += [x._version - before[0], w._version - before[1], outcome(lambda: torch.autograd.grad(out.sum(), a)[0])]  # noqa: B023
            told += [outcome(lambda: torch.autograd.grad(s, a)[0]) for s in saved]  # noqa: B023
        seen.append(told)
    same(*seen)
    assert vitrify.counters["eager_calls"] <= 2 and vitrify.counters["captures"] <= 2  # one for each way in which they share memory


def test_calls_whose_argument_shares_memory_with_what_is_captured():
    """Their plan served no call: each was captured anew, and ran eagerly."""
    mine, w = torch.arange(8.0).chunk(2)

    def f(x):
        w.mul_(2)
        return x * w
    compiled, theirs = vitrify.compile(f, fullgraph=True), w.clone()
    for x in (mine, mine, torch.ones(4), mine, torch.ones(4)):
        theirs = theirs * 2
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), x * theirs)
    assert vitrify.counters["eager_calls"] == 0 and vitrify.counters["captures"] == 2


@pytest.mark.eager("which counts its versions with another tensor", "reads", some=True)
@pytest.mark.parametrize("how", ["zero_grad", "mul_", "clip", "detached"])
@pytest.mark.parametrize("order", ["aabb", "bbaa", "abab"])
def test_gradients_that_share_a_buffer_in_some_calls(order, how):
    """What was written was counted for one of those that shared a counter in the first call."""
    expects.no_kernels("zeros are copied" if how == "zero_grad" else "such calls run eagerly")
    told = []
    for compiles in (False, True):
        m, seen = nn.Linear(2, 2), []
        params = list(m.parameters())

        def f():
            if how == "zero_grad":
                m.zero_grad(set_to_none=False)  # noqa: B023
            elif how == "clip":
                nn.utils.clip_grad_norm_(params, 0.5)  # noqa: B023
            else:
                for p in params:  # noqa: B023
                    p.grad.mul_(2)
        f = vitrify.compile(f) if compiles else f
        for kind in order:
            flat = torch.ones(6)
            if kind == "b":
                m.weight.grad, m.bias.grad = torch.ones(2, 2), torch.ones(2)
            elif how == "detached":
                m.weight.grad, m.bias.grad = (g := torch.ones(4, 2))[:2].detach(), g[2].detach()
            else:
                m.weight.grad, m.bias.grad = flat[:4].view(2, 2), flat[4:]
            before = [p.grad._version for p in params]
            f()
            seen.append([p.grad._version - b for p, b in zip(params, before)] + [round(x, 5) for p in params for x in p.grad.flatten().tolist()])
        told.append(seen)
    assert told[1] == told[0]
