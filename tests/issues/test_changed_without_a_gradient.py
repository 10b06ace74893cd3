"""Eager's nodes unpack what they have saved where no gradient comes to them, too, and raise of what the program has written since: behind a Function that
gives none, and behind a module with hooks of which one result alone is used."""
import expects
import pytest
import torch
import vitrify
from torch import nn
from torch.utils.checkpoint import checkpoint


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return x.clone(), y.clone()

    @staticmethod
    def backward(ctx, a, b):
        return a, b


def multiplied(x):
    y = x * 2
    z = y.clone()
    z.mul_(y)
    y.cumsum_(0)
    return z.sin()


def sine(x):
    y = x * 2
    z = y.sin()
    y.mul_(2)
    return z


def untouched(x):
    y = x * 2
    z = y.exp()
    y.mul_(2)
    return z


PROGRAMS = [multiplied, sine, untouched]


def compare(run, program):
    for _ in range(2):
        ours, theirs = (outcome(run, f) for f in (vitrify.compile(program), program))
        assert ours == theirs


def outcome(run, f):
    try:
        return [None if g is None else g.tolist() for g in run(f)]
    except RuntimeError as error:
        return str(error).partition("Hint")[0].partition(", which is output")[0]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_behind_a_function(program, backward):
    def run(f):
        x, y = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
        first, _ = Passes.apply(y * 2, f(x))
        if backward:
            first.sum().backward()
            return x.grad, y.grad
        return torch.autograd.grad(first.sum(), [x, y], allow_unused=True)
    compare(run, program)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("program", PROGRAMS)
def test_of_a_module_with_hooks(program, which, batched):
    class Net(nn.Module):
        def forward(self, x, y):
            return y.view(-1), program(x)

    def run(compiled):
        net = Net()
        net.register_full_backward_hook(lambda m, given, made: None)
        x, y = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
        r = (vitrify.compile(net) if compiled else net)(x, y)[which]
        tangents = torch.eye(r.numel()).view(-1, *r.shape) if batched else torch.ones_like(r)
        return torch.autograd.grad(r, [x, y], tangents, is_grads_batched=batched, allow_unused=True)
    for _ in range(2):
        assert outcome(run, True) == outcome(run, False)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("given", ["expanded", "view", "other"])
def test_another_shape_counts_as_a_write_to_what_shares_memory(given, checkpointed):
    """An in-place change of shape raises the version of all views of that memory: what reads one of them in its gradient is refused."""
    def f(x, y, w):
        product = checkpoint(torch.mul, y, w, use_reentrant=False) if checkpointed else y * w
        x.swapaxes_(1, 1)
        return product

    def run(f):
        torch.manual_seed(0)
        x, w = torch.randn(3, 4), torch.randn(4, requires_grad=True)
        y = {"expanded": lambda: x.expand(2, 3, 4), "view": lambda: x[:], "other": lambda: x.clone()}[given]()
        try:
            f(x, y, w).sum().backward()
        except RuntimeError as e:
            return str(e).partition(":")[0], y._version
        return [round(g, 4) for g in w.grad.tolist()], y._version

    if given != "other":
        expects.eager("it writes to one of two views of one tensor, beside gradients")
    compiled = vitrify.compile(f)
    for _ in range(2):
        assert run(compiled) == run(f)
