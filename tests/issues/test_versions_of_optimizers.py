"""Versions that an update leaves. Eager's fused ops count none, which a loop in their place does not change: what was saved before such a step is used after it."""
import pytest
import torch
import vitrify
from torch import nn, optim

# The first call makes the optimizer's state.
pytestmark = pytest.mark.eager("it writes Python state, as caches do at first", "it makes gradients that are there from the first call on", some=True)

OPTIMIZERS = {
    "SGD": lambda p, **how: optim.SGD(p, lr=0.1, momentum=0.9, **how),
    "Adam": lambda p, **how: optim.Adam(p, lr=0.1, amsgrad=True, **how),
    "AdamW": lambda p, **how: optim.AdamW(p, lr=0.1, **how),
    "Adagrad": lambda p, **how: optim.Adagrad(p, lr=0.1, **how),
}


def run(name, compiled, how, whole):
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((2, 2), 2.0))
    optimizer = OPTIMIZERS[name]([{"params": [p], **how}, {"params": [q]}])

    def step():
        if whole:
            optimizer.zero_grad()
            (p.square().sum() + q.square().sum()).backward()
        optimizer.step()
        if whole:
            with torch.no_grad():
                q.clamp_(-1, 1)
                p.clamp_(-1, 1)

    step = vitrify.compile(step if whole else optimizer.step) if compiled else step if whole else optimizer.step
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    loss, seen = (p * p).sum(), []
    for _ in range(4):
        step()
        seen.append([t._version for t in (p, q)] + [(k, v._version) for t in (p, q) for k, v in sorted(optimizer.state[t].items()) if torch.is_tensor(v)])
    p.grad = None
    try:
        loss.backward()
        seen.append(p.grad)
    except RuntimeError as e:
        seen.append(str(e))
    return seen


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("how", [dict(fused=True), dict(foreach=True), {}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_eager(name, how, whole):
    eager, ours = run(name, False, how, whole), run(name, True, how, whole)
    assert eager[:4] == ours[:4]
    if torch.is_tensor(eager[4]):
        torch.testing.assert_close(ours[4], eager[4])
    else:
        assert ours[4] == eager[4]


def given_twice(compiled, make, shares):
    w, v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))
    optimizer = make(*{"a parameter": [w, w], "steps": [w, v], "an average": [w, v], "a gradient": [w, v], "all of a gradient and an average": [w, v]}[shares])
    step = vitrify.compile(optimizer.step) if compiled else optimizer.step
    seen = []
    for k in range(4):
        w.grad, v.grad = torch.tensor([1.0, 2.0, -3.0]) + k, torch.tensor([0.5, -k, 3.0])
        if k and shares != "a parameter":
            a, b = optimizer.state[w], optimizer.state[v]
            if shares == "steps":
                b["step"] = a["step"]
            elif shares == "an average":
                b["exp_avg"] = a["exp_avg"]
            elif shares == "a gradient":
                v.grad = w.grad
            else:
                w.grad = a["exp_avg"]
        step()
        seen += [t.detach().clone() for t in (w, v, *(s for p in (w, v) for s in optimizer.state[p].values() if torch.is_tensor(s)))]
    return seen


TWICE = {"Adam": lambda *p: optim.Adam(p, lr=0.1, fused=True), "AdamW": lambda *p: optim.AdamW(p, lr=0.1, amsgrad=True, fused=True)}


@pytest.mark.eager("a fused optimizer is given one memory twice", "which it has by another name as well", some=True)
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters", "ignore::vitrify.VitrifyWarning")
@pytest.mark.parametrize("shares", ["a parameter", "steps", "an average", "all of a gradient and an average"])
@pytest.mark.parametrize("name", TWICE)
def test_what_fused_ops_are_given_twice(name, shares):
    """The fused op takes all steps as they are counted by then."""
    torch.testing.assert_close(given_twice(True, TWICE[name], shares), given_twice(False, TWICE[name], shares))


@pytest.mark.eager("which it has by another name as well")
@pytest.mark.parametrize("name", TWICE)
def test_one_gradient_for_two_parameters(name):
    torch.testing.assert_close(given_twice(True, TWICE[name], "a gradient"), given_twice(False, TWICE[name], "a gradient"))
