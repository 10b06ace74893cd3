"""Two tensors that a program finds, one of which follows from the other: autograd goes on from each by itself, and the gradient of the one behind was counted
twice."""
import expects
import pytest
import torch
import vitrify
from torch import nn
from torch.utils.checkpoint import checkpoint

HISTORIES = {
    "a sum": lambda x: x + 1, "a product": lambda x: x * 3, "a view": lambda x: x.view(-1), "transposed": lambda x: x.view(2, 2).t().reshape(4),
    "expanded": lambda x: x.expand(2, 4), "a part": lambda x: torch.cat([x[:2], x[2:]]), "saved": lambda x: x.exp(), "through another": lambda x: (x * 2).view(4) + 1,
}
USES = {
    "forward": lambda y, x: y.sum().backward(),
    "some": lambda y, x: x.backward(torch.autograd.grad(y.sum(), x)[0]),
    "twice": lambda y, x: torch.autograd.grad(y.sin().sum(), x, create_graph=True)[0].square().sum().backward(),
}


@pytest.mark.parametrize("use", USES.values(), ids=list(USES))
@pytest.mark.parametrize("history", HISTORIES.values(), ids=list(HISTORIES))
@pytest.mark.parametrize("inside", [lambda f: f, lambda f: lambda w: checkpoint(f, w, use_reentrant=False)], ids=["plain", "checkpoint"])
@pytest.mark.eager("which follows from another tensor that it reads", "meets a tensor that is neither an argument", some=True)
@pytest.mark.no_kernels("eager has both histories")
def test_both_are_read(history, use, inside):
    def run(compiles):
        x = torch.tensor([0.5, 1.0, 1.5, 2.0], requires_grad=True)
        t, w = history(x), torch.linspace(1, 2, 4, requires_grad=True)
        y = compiles(inside(lambda w: t * x * w))(w)
        use(y, x)
        return y.detach(), x.grad, w.grad
    torch.testing.assert_close(run(vitrify.compile), run(lambda f: f))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(2, 3, bias=False)
        self.decoder = self.encoder.weight.t()

    def forward(self, x):
        return self.encoder(x).tanh() @ self.decoder.t()


@pytest.mark.eager("which follows from another tensor that it reads")
@pytest.mark.no_kernels("eager has both histories")
def test_tied_weights():
    results = []
    for compiles in (vitrify.compile, lambda m: m):
        torch.manual_seed(0)
        module = Tied()
        compiles(module)(torch.randn(4, 2)).square().mean().backward()
        results.append(module.encoder.weight.grad)
    torch.testing.assert_close(*results)


def test_one_of_them_is_read():
    """The other has its gradient by way of the history."""
    def run(compiles):
        x = torch.tensor([0.5, 1.0], requires_grad=True)
        t, w = x + 1, torch.ones(2)
        compiles(lambda w: (t * w).sin())(w).sum().backward()
        return x.grad
    before = vitrify.counters["kernels_launched"]
    torch.testing.assert_close(run(lambda f: vitrify.compile(f, fullgraph=True)), run(lambda f: f))
    assert vitrify.counters["kernels_launched"] > before


def test_side_by_side():
    """Neither leads to the other."""
    def run(compiles):
        x = torch.tensor([0.5, 1.0], requires_grad=True)
        s, t = x * 2, x + 1
        compiles(lambda w: s * t * w)(torch.ones(2)).sum().backward()
        return x.grad
    torch.testing.assert_close(run(lambda f: vitrify.compile(f, fullgraph=True)), run(lambda f: f))


OWN = {
    "a product": lambda x: x * 1, "a sum": lambda x: x + 1, "a view": lambda x: x.view(2, 2).t().reshape(4), "saved": lambda x: x.sin(),
}


@pytest.mark.parametrize("then", [lambda w: w.detach() * 2, lambda w: w.sin()], ids=["detached", "followed"])
@pytest.mark.parametrize("keep", [False, True], ids=["freed", "kept"])
@pytest.mark.parametrize("history", OWN.values(), ids=list(OWN))
@pytest.mark.eager("a backward of its own goes on through the history of what it finds", "meets a tensor that is neither an argument", some=True)
@pytest.mark.no_kernels("eager has the history")
def test_a_backward_of_its_own(history, keep, then):
    """It ran eager's nodes on placeholders: the leaf behind had one for its gradient, and eager found its graph freed."""
    def run(compiles):
        x, w = torch.linspace(1, 2, 4, requires_grad=True), torch.linspace(1, 3, 4, requires_grad=True)
        t = history(x)
        step = compiles(lambda w: ((t * w).sum().backward(retain_graph=keep), then(w))[1])
        results = [step(w).detach(), x.grad.clone(), w.grad.clone()]
        if keep:
            results += [step(w).detach(), x.grad, w.grad]
        return results
    torch.testing.assert_close(run(vitrify.compile), run(lambda f: f))


@pytest.mark.eager("a backward of its own goes on through the history of what it finds", "meets a tensor that is neither an argument", some=True)
@pytest.mark.no_kernels("eager has the history")
def test_a_state_with_a_history():
    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(2, 2, bias=False)
            self.h = self.l(torch.ones(3, 2))

        def forward(self, x):
            loss = (self.l(x) + self.h).square().mean()
            loss.backward()
            return loss.detach()
    results = []
    for compiles in (vitrify.compile, lambda m: m):
        torch.manual_seed(0)
        module = Step()
        results.append((compiles(module)(torch.ones(3, 2)), module.l.weight.grad))
    torch.testing.assert_close(*results)


WRITES = {
    "whole": lambda t, w: t.mul_(w), "a part": lambda t, w: t[1:].mul_(w[1:]), "copied": lambda t, w: t.copy_(w * 2), "without an operand": lambda t, w: t.exp_(),
}


@pytest.mark.parametrize("with_history", [False, True], ids=["plain", "with a history"])
@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
@pytest.mark.eager("a view, in a way that gradients must follow", "meets a tensor that is neither an argument", some=True)
def test_a_view_that_is_found_is_written(write, with_history):
    """The base kept the history that the trace had given it."""
    if with_history or write is not WRITES["without an operand"]:
        expects.no_kernels("eager writes to the base")
    def run(compiles):
        x = torch.ones(8, requires_grad=True)
        base = x * 1 if with_history else torch.arange(8.0)
        t, w = base[:4], torch.linspace(1, 2, 4, requires_grad=True)
        y = compiles(lambda w: (write(t, w), w * 3)[1])(w)
        y.sum().backward()
        if base.requires_grad:
            base.sum().backward()
        return y.detach(), base.detach(), x.grad, w.grad, base.requires_grad, t.requires_grad
    ours, eager = run(vitrify.compile), run(lambda f: f)
    torch.testing.assert_close(ours[:2], eager[:2])
    for a, b in zip(ours[2:4], eager[2:4]):
        assert (a is None) == (b is None) and (a is None or torch.allclose(a, b))
    assert ours[4:] == eager[4:]


def test_a_view_that_is_found_is_written_without_gradients():
    base = torch.arange(8.0)
    t, w = base[:4], torch.ones(4, requires_grad=True)

    def fn(w):
        with torch.no_grad():
            t.add_(w)
        return (w * 3).sin()
    compiled, before = vitrify.compile(fn, fullgraph=True), vitrify.counters["kernels_launched"]
    compiled(w).sum().backward()
    assert base.tolist() == [1, 2, 3, 4, 4, 5, 6, 7] and vitrify.counters["kernels_launched"] > before
