"""A plan held the accumulators of the weights that it found, which know the shape that a weight had, and the hooks on them: gradients of a weight that had grown were
added up wrongly or raised, also in eager programs."""
import copy

import pytest
import torch
import vitrify
from torch import nn


def more(w):
    w.data = torch.cat([w.data] * 2)


def rewritten(w):
    with torch.no_grad():
        w.requires_grad_(False)
        w.resize_(2 * w.shape[0], *w.shape[1:]).fill_(0.5)
        w.requires_grad_()


def turned(w):
    with torch.no_grad():
        w.t_()
        w.t_()
    more(w)


@pytest.mark.parametrize("grow", [more, rewritten, turned])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("make", [lambda: nn.Linear(2, 1, bias=False), lambda: nn.Embedding(3, 2)], ids=["linear", "embedding"])
def test_a_weight_grows(make, order, grow):
    torch.manual_seed(0)
    theirs = make()
    ours = copy.deepcopy(theirs)
    told = []
    for m in (theirs, ours):
        f = vitrify.compile(m, fullgraph=True) if m is ours else m
        for n in range(4):
            x = torch.tensor([0, n % 2, n]) if isinstance(m, nn.Embedding) else torch.tensor([[1.0, 2.0 + n]])
            out = f(x)
            tangent = torch.arange(1.0, out.numel() + 1).view_as(out)
            if order == 2:
                first, = torch.autograd.grad((out.square() * tangent).sum(), m.weight, create_graph=True)
                first.square().sum().backward()
            else:
                (out * tangent).sum().backward()
            told.append([m.weight.grad.clone(), out.detach()])
            m.weight.grad = out = first = None  # eager's own graph knows the shape that the weight had
            if n in (0, 2):
                grow(m.weight)
    torch.testing.assert_close(told[4:], told[:4])


def test_programs_beside_it():
    """An eager program that has nothing to do with the compiled one."""
    w = torch.ones(2, 3, requires_grad=True)
    vitrify.compile(lambda x: x * w, fullgraph=True)(torch.ones(2, 3)).sum().backward()
    w.grad = None
    w.data = torch.ones(4, 3)
    (w * 2).sum().backward()
    assert w.grad.tolist() == [[2.0] * 3] * 4


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_hooks_on_the_accumulator_go_with_the_graph(kind):
    w = torch.ones(3, requires_grad=True)
    f = vitrify.compile(lambda x: x * w, fullgraph=True)
    f(torch.ones(3)).sum().backward()
    calls = []
    out = f(torch.ones(3))
    node = w.expand_as(w).grad_fn.next_functions[0][0]
    getattr(node, kind)(lambda *_: calls.append(1))
    del node
    out.sum().backward()
    assert len(calls) == 1
    del out
    f(torch.ones(3)).sum().backward()
    assert len(calls) == 1


def test_hooks_on_an_accumulator_that_somebody_holds_stay():
    w = torch.ones(3, requires_grad=True)
    node, calls = w.expand_as(w).grad_fn.next_functions[0][0], []
    node.register_hook(lambda *_: calls.append(1))
    f = vitrify.compile(lambda x: x * w, fullgraph=True)
    for n in range(1, 4):
        f(torch.ones(3)).sum().backward()
        assert len(calls) == n and w.grad.tolist() == [float(n)] * 3


@pytest.mark.eager("follows from another tensor", "go on through the history", some=True)
@pytest.mark.parametrize("name", ["read", "grad", "backward"])
def test_a_captured_tensor_that_follows_from_another(name):
    told = []
    for compiles in (False, True):
        w = torch.arange(1.0, 4.0).requires_grad_()
        h = w * 2

        def f(x):
            y = x * h * w  # noqa: B023
            if name == "grad":
                return torch.autograd.grad(y.sum(), w, retain_graph=True)[0]  # noqa: B023
            if name == "backward":
                y.sum().backward(inputs=[w], retain_graph=True)  # noqa: B023
            return y
        f = vitrify.compile(f) if compiles else f
        for _ in range(3):
            out = f(torch.ones(3))
            if name == "read":
                out.sum().backward(retain_graph=True)
            told.append((out.tolist(), None if w.grad is None else w.grad.tolist()))
    assert told[3:] == told[:3]
