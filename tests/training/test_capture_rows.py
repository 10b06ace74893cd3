"""Rows of capture.md, sections A and C, that are tested nowhere else."""
import ctypes

import pytest
import torch
import vitrify
from gradients import leaf
from torch import nn


@pytest.mark.eager("it registers a hook on a tensor")
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
def test_hooks_that_calls_register_on_an_input_stay():
    """A5: each call adds one, for this and for later calls."""
    def fn(x):
        x.register_hook(lambda g: g * 2)
        return (x * 3).sum()
    seen = []
    for f in (fn, vitrify.compile(fn)):
        x = leaf(2)
        for _ in range(3):
            x.grad = None
            f(x).backward()
            seen.append(x.grad[0].item())
    assert seen == [6, 12, 24] * 2


@pytest.mark.no_kernels("the program raises")
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
@pytest.mark.parametrize("grad", [False, True])
def test_generators_are_put_back_when_a_capture_throws(grad):
    """A9: what is left is what eager leaves."""
    def fn(x, seed):
        y = torch.rand(3) + x
        if seed:
            torch.manual_seed(9)
        torch.rand(2)
        raise ValueError(f"no {y.shape}")
    for seed in (False, True):
        states = []
        for f in (fn, vitrify.compile(fn)):
            torch.manual_seed(3)
            with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="no torch.Size"):
                f(torch.ones(3, requires_grad=True), seed)
            states.append(torch.get_rng_state())
        assert torch.equal(*states)


@pytest.mark.eager("neither an argument nor reachable")
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
def test_a_tensor_that_nothing_leads_to_is_not_pinned():
    """A10: no guard can see that it is another one."""
    hidden = ctypes.py_object()
    fn = lambda x: x * hidden.value  # noqa: E731
    compiled = vitrify.compile(fn)
    for i in range(4):
        hidden.value = torch.full((2,), float(i))
        x = leaf(2)
        compiled(x).sum().backward()
        assert torch.equal(x.grad, hidden.value)


def test_no_edge_leads_to_what_is_not_used():
    """A2: DDP looks for unused parameters along the edges."""
    used, unused = nn.Linear(3, 2), nn.Linear(3, 2)
    out = vitrify.compile(lambda x: (used(x), unused(x).detach()), fullgraph=True)(torch.randn(4, 3))[0]
    reached, todo = set(), [out.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in reached:
            reached.add(node)
            todo += [n for n, _ in node.next_functions]
    variables = [n.variable for n in reached if hasattr(n, "variable")]
    assert {id(v) for v in variables} == {id(p) for p in used.parameters()}
    assert vitrify.counters["kernels_launched"] + vitrify.counters["externs_called"] > 0
