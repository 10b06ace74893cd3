"""What the function of a checkpoint finds by itself, eager's backward reads as it is by then, whatever was counted: its arguments alone were saved."""
import pytest
import torch
import vitrify
from beside import same_outcome
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")


class Net(nn.Module):
    def __init__(self, of, beside, passed):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.of, self.beside, self.passed = nn.Linear(6, 6), of, beside, passed

    def forward(self, x):
        w = self.linear.weight
        y = checkpoint(lambda t, *_: self.of(self.linear(t)), x, *([w] if self.passed else []), use_reentrant=False)
        return y + x @ w if self.beside else y * 2


def trained(net, call):
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    out = call(x)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.5)
    try:
        out.sum().backward()
    except RuntimeError as e:
        return str(e).partition(":")[0]
    return [x.grad, *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("of", [lambda t: t, nn.functional.gelu, lambda t: t.sin().exp()], ids=["linear", "gelu", "chain"])
@pytest.mark.parametrize("beside, passed", [(False, False), (True, False), (False, True)], ids=["found", "saved beside", "passed"])
def test_weights_written_before_the_backward(of, beside, passed):
    eager, ours = Net(of, beside, passed), Net(of, beside, passed)
    compiled, before = vitrify.compile(ours, fullgraph=True), vitrify.counters["kernels_launched"]
    for _ in range(2):
        expected, given = trained(eager, eager), trained(ours, compiled)
        assert isinstance(expected, str) == (beside or passed)
        if isinstance(expected, str):
            assert given == expected
            return
        for a, b in zip(given, expected):
            torch.testing.assert_close(a, b)
    assert vitrify.counters["kernels_launched"] > before


NESTED = {
    "found by the inner one": lambda x, w: checkpoint(lambda a: checkpoint(lambda b: (b @ w).tanh(), a * 2, use_reentrant=False).sin(), x, use_reentrant=False),
    "passed to the inner one": lambda x, w: checkpoint(lambda a: checkpoint(lambda b, v: (b @ v).tanh(), a * 2, w, use_reentrant=False).sin(), x, use_reentrant=False),
    "passed to the outer one": lambda x, w: checkpoint(lambda a, v: checkpoint(lambda b: (b @ v).tanh(), a * 2, use_reentrant=False).sin(), x, w, use_reentrant=False),
    "passed to both": lambda x, w: checkpoint(lambda a, v: checkpoint(lambda b, v: (b @ v).tanh(), a * 2, v, use_reentrant=False).sin(), x, w, use_reentrant=False),
    "after one": lambda x, w: checkpoint(torch.sin, checkpoint(lambda b, v: (b @ v).tanh(), x, w, use_reentrant=False), use_reentrant=False),
}


@pytest.mark.parametrize("which", [0, 1], ids=["input", "weight"])
@pytest.mark.parametrize("name", NESTED)
def test_checkpoints_in_checkpoints(name, which):
    """What an inner one has saved is made again with what the outer one has: that alone is looked at for versions."""
    def run(f):
        args = [torch.randn(4, 4, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(2)]
        out = f(*args)
        with torch.no_grad():
            args[which].mul_(2)
        try:
            return torch.autograd.grad(out.sum(), args)
        except RuntimeError as e:
            return str(e).partition(":")[0]
    same_outcome(run, NESTED[name])


COMPUTED_AGAIN = {
    "a weight": lambda x, w, b: (x @ w).tanh(),
    "a bias": lambda x, w, b: nn.functional.linear(x, w, b),  # of which nothing is saved
    "a factor": lambda x, w, b: (x * b).sin() @ w,
}


@pytest.mark.parametrize("twice", [False, True], ids=["", "gradients of gradients"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("found", [False, True], ids=["passed", "found"])
@pytest.mark.parametrize("fn", COMPUTED_AGAIN)
@pytest.mark.eager("op by op: what they read is changed", some=True)
def test_what_needs_gradients_by_then(fn, found, which, first, twice):
    """What was recorded when they were needed as in the forward was computed, where torch finds another number of tensors, or other gradients."""
    def program(x, w, b):
        if found:
            return checkpoint(lambda x: COMPUTED_AGAIN[fn](x, w, b), x, use_reentrant=False) * 2
        return checkpoint(COMPUTED_AGAIN[fn], x, w, b, use_reentrant=False) * 2

    def outcome(f):
        generator = torch.Generator().manual_seed(0)
        x, w, b = given = [torch.randn(s, generator=generator).requires_grad_() for s in ((4, 6), (6, 6), (6,))]
        given[which].requires_grad_(first)
        y = f(x, w, b)
        given[which].requires_grad_(not first)
        try:
            g, = torch.autograd.grad(y.sum(), x, create_graph=twice)
            if twice and g.requires_grad:
                g.square().sum().backward()
        except RuntimeError as e:
            return type(e), str(e).partition("\n")[0]
        given[which].requires_grad_(first)
        return [g.detach(), *(t.grad for t in given)]
    compiled = vitrify.compile(program, fullgraph=True)
    for _ in range(2):
        ours, eager = outcome(compiled), outcome(program)
        if isinstance(eager, tuple):
            assert ours == eager
        else:
            torch.testing.assert_close(ours, eager)


@pytest.mark.eager("op by op: what they read is changed", some=True)
def test_a_frozen_layer():
    """The same of parameters, which a program has by itself."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

    def program(x):
        return checkpoint(net, x, use_reentrant=False)
    compiled = vitrify.compile(program, fullgraph=True)
    for frozen in (False, True, False):
        outcomes = []
        for f in (compiled, program):
            net.requires_grad_(True)
            x = torch.ones(2, 6, requires_grad=True)
            y = f(x)
            net[2].requires_grad_(not frozen)
            try:
                outcomes.append(torch.autograd.grad(y.sum(), x)[0])
            except RuntimeError as e:
                outcomes.append(str(e).partition("\n")[0])
        assert isinstance(outcomes[1], str) == frozen
        if frozen:
            assert outcomes[0] == outcomes[1]
        else:
            torch.testing.assert_close(*outcomes)


@pytest.mark.parametrize("found", [False, True], ids=["passed", "found"])
@pytest.mark.eager("op by op: what they read is changed", some=True)
def test_an_argument_loses_its_history(found):
    def program(x, h):
        return checkpoint(lambda x: x * h.sin(), x, use_reentrant=False) if found else checkpoint(lambda x, h: x * h.sin(), x, h, use_reentrant=False)
    outcomes = []
    for f in (vitrify.compile(program, fullgraph=True), program):
        x = torch.ones(4, requires_grad=True)
        h = x * 2
        y = f(x, h)
        h.detach_()
        with pytest.raises(RuntimeError) as e:
            y.sum().backward()
        outcomes.append((type(e.value), str(e.value).partition("\n")[0]))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("between", [False, True], ids=["before", "between two derivatives"])
@pytest.mark.parametrize("fn", [lambda x, a: (x * a).sin(), lambda x, a: x.detach() * a * x, lambda x, a: (x + a).sin()], ids=["read", "not read", "added"])
@pytest.mark.eager("op by op: what they read is changed", some=True)
def test_a_result_that_is_found_loses_its_history(fn, between):
    """Its function computes again with a tensor that needs no gradient, and saves others."""
    def program(x):
        a = x.exp()
        return a, checkpoint(lambda x: fn(x, a), x, use_reentrant=False)

    def outcome(f):
        x = torch.linspace(-1, 1, 4, requires_grad=True)
        a, y = f(x)
        try:
            if not between:
                a.detach_()
            g, = torch.autograd.grad(y.sum(), x, create_graph=True)
            if between:
                a.detach_()
            return g.detach(), torch.autograd.grad(g.square().sum(), x)[0]
        except RuntimeError as e:
            return str(e).partition("\n")[0]
    compiled, eager = vitrify.compile(program, fullgraph=True), outcome(program)
    for _ in range(2):
        ours = outcome(compiled)
        if isinstance(eager, str):
            assert ours == eager
        else:
            torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("deep", [2, 3])
@pytest.mark.parametrize("history", [False, True], ids=["a leaf", "with a history"])
def test_a_checkpoint_inside_another(deep, history):
    """A derivative that was taken after the capture computed the outer again with eager's own inside, which saves less than ours."""
    def f(x):
        of = torch.sin
        for _ in range(deep):
            of = (lambda x, of=of: checkpoint(of, x, use_reentrant=False))
        return of(x)
    compiled, grads = vitrify.compile(f), []
    for g in (f, compiled, compiled):
        x = torch.linspace(-2, 2, 5, dtype=torch.float64, requires_grad=True)
        y = g(x * 1 if history else x)
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


@pytest.mark.parametrize("view", [lambda x: x.view(4, 5), lambda x: x.view_as(x), lambda x: x.transpose(0, 1), lambda x: x[:, 1:]])
def test_arguments_that_were_written_by_way_of_a_view_of_all_of_them(view):
    def program(x):
        x = x.clone()
        view(x)[..., 0].fill_(3)
        return x, checkpoint(lambda t: torch.sin(t), x, use_reentrant=False)

    fast = vitrify.compile(program)

    def run(f, writes):
        x = torch.linspace(-1, 1, 20).view(1, 4, 5).requires_grad_()
        out = f(x)
        with torch.no_grad():
            out[0].add_(writes) if writes else None
        sum(o.sum() for o in out).backward()
        return x.grad
    torch.testing.assert_close(run(fast, 0), run(program, 0))
    for f in (program, fast):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(f, 1)


def test_an_argument_that_was_written_by_way_of_data():
    """That write is not counted; one of the user's is, to the same memory."""
    def program(x):
        h = x * 2
        y = checkpoint(torch.sin, h, use_reentrant=False)
        h.data.mul_(2)
        return y, h

    def run(f, writes):
        x = torch.linspace(-1, 1, 20).requires_grad_()
        y, h = f(x)
        h.mul_(3) if writes else None
        y.sum().backward()
        return x.grad
    fast = vitrify.compile(program)
    torch.testing.assert_close(run(fast, False), run(program, False))
    for f in (program, fast):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(f, True)
