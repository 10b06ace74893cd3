"""Where a checkpoint, or hooks on saved tensors, stand within the program, a plan held the nodes that add up its weights' gradients: hooks on them stayed for ever, and a weight that
had grown had no gradient."""
import pytest
import torch
import vitrify
from torch import nn
from torch.autograd.graph import get_gradient_edge, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def hooked(f, x):
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return f(x)


def on_cpu(f, x):
    with save_on_cpu():
        return f(x)


AROUND = {"checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=False), "hooks": hooked, "save_on_cpu": on_cpu, "beside": lambda f, x: f(checkpoint(torch.sin, x * 1, use_reentrant=False))}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", AROUND)
def test_hooks_on_a_node_go_with_its_graph(name, order):
    told = []
    for compiles in (False, True):
        w = nn.Parameter(torch.full((3, 3), 0.5))
        f = lambda x: AROUND[name](lambda x: torch.tanh(x @ w), x)  # noqa: B023
        f = vitrify.compile(f) if compiles else f
        for _ in range(4):
            y = f(torch.full((1, 3), 0.1)).square().sum()
            if order == 2:
                y = torch.autograd.grad(y, w, create_graph=True)[0].square().sum()
            get_gradient_edge(w).node.register_prehook(lambda g: (g[0] * 2,))
            w.grad = None
            y.backward()
            told.append(w.grad)
            del y
    torch.testing.assert_close(told[4:], told[:4])


@pytest.mark.eager("returned an invalid gradient", some=True)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("name", AROUND)
def test_a_weight_grows(name, held):
    told = []
    for compiles in (False, True):
        w, kept = nn.Parameter(torch.ones(2, 2)), []
        f = lambda x: AROUND[name](lambda x: torch.tanh(x @ w), x)  # noqa: B023
        f = vitrify.compile(f) if compiles else f
        if held:
            w.expand_as(w).sum().backward()
            kept.append(w.expand_as(w))  # leads to the node that the weight has
        for k in (2, 3, 4):
            w.grad = None
            w.data = torch.ones(k, k)
            try:
                f(torch.ones(1, k)).sum().backward()
                told.append(w.grad)
            except RuntimeError as e:
                told.append(torch.tensor(len(str(e))))
    torch.testing.assert_close(told[3:], told[:3])


def test_a_weight_of_another_size_by_the_time_of_another_gradient():
    told = []
    for compiles in (False, True):
        w, b = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
        f = lambda x: torch.tanh(x + w + b)  # noqa: B023
        f = vitrify.compile(f, fullgraph=True) if compiles else f
        for _ in range(2):
            y = f(torch.ones(3)).sum()
            before, w.data = w.data, torch.empty(0)
            told += torch.autograd.grad(y, b)
            w.data = before
    torch.testing.assert_close(told[2:], told[:2])


class Clears(torch.autograd.Function):
    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].exp()


@pytest.mark.eager("lets go of what it has saved when that is read")
def test_functions_that_clear_what_they_have_saved():
    told = []
    for f in (lambda x: Clears.apply(x.sin()), vitrify.compile(lambda x: Clears.apply(x.sin()))):
        x = torch.ones(3, requires_grad=True)
        for _ in range(2):
            y = f(x).sum()
            told.append(torch.autograd.grad(y, x, retain_graph=True)[0].tolist())
            with pytest.raises(RuntimeError, match="can only be accessed once"):
                torch.autograd.grad(y, x)
            told.append(torch.autograd.grad(torch.autograd.grad(f(x).sum(), x, create_graph=True)[0].sum(), x)[0].tolist())
    assert told[4:] == told[:4]
