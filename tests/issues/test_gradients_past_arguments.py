"""Gradients that a program takes itself go on through the history of what it is given, where that leads to what they are asked for."""
import expects
import pytest
import torch
import vitrify
from torch.autograd import grad
from torch.autograd.graph import get_gradient_edge

W = torch.linspace(0.5, 1.5, 4, dtype=torch.float64, requires_grad=True)
GOES_ON = "go on through the history of what it is given"


def backward_to(y, x):
    (y * x).sum().backward(inputs=[x])


PROGRAMS = {
    "product": lambda y, x: grad((y * x).sum(), x, retain_graph=True)[0],
    "kept graph": lambda y, x: grad((y * x).sum(), x, create_graph=True)[0],
    "nothing computed on the way": lambda y, x: grad(y + x, x, torch.ones_like(y), retain_graph=True)[0],
    "given only": lambda y, x: grad(y.sum() * 2, x, allow_unused=True, retain_graph=True)[0],
    "the argument itself": lambda y, x: grad(y, x, torch.ones_like(y), allow_unused=True, retain_graph=True)[0],
    "view": lambda y, x: grad((y.view(2, 2).sin() @ x.view(2, 2)).sum(), x, retain_graph=True)[0],
    "both": lambda y, x: grad((y * x).sum(), (y, x), retain_graph=True),
    "weight": lambda y, x: grad((y * W).sum(), W, retain_graph=True, allow_unused=True)[0],
    "unused weight": lambda y, x: grad((y * x).sum(), W, retain_graph=True, allow_unused=True)[0],
    "from an edge": lambda y, x: grad(get_gradient_edge((y * x).sum()), x, torch.ones((), dtype=torch.float64), retain_graph=True)[0],
    "backward": backward_to,
}
UNUSED = ("given only", "the argument itself", "unused weight")
HISTORIES = {
    "of x": lambda x: x.sin(), "a view": lambda x: x.view(4, 1).view(4), "of W": lambda x: W.cos(), "of both": lambda x: W * x,
    "of a compiled call": lambda x: vitrify.compile(lambda a: a.tanh())(x), "of neither": lambda x: torch.ones_like(x).requires_grad_() * 3,
}


def plain(r):
    return [t if t is None else t.detach().clone() for t in (r if isinstance(r, tuple) else (r,))]


def use(f, leaf, histories):
    results = []
    for history in histories:
        x = torch.linspace(1, 2, 4, dtype=torch.float64, requires_grad=True)
        given = x if leaf else x * 1
        W.grad = None
        results += plain(f(HISTORIES[history](given), given)) + plain((x.grad, W.grad))
    return results


def same(a, b):
    assert [t is None for t in a] == [t is None for t in b]
    for t, u in zip(a, b, strict=True):
        if t is not None:
            torch.testing.assert_close(t, u)


@pytest.mark.eager(GOES_ON, "a placeholder has no gradient", some=True)
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("history", HISTORIES)
def test_first_call(history, program, leaf):
    """They ended at the arguments: of the product only the part of x itself came back."""
    if program in UNUSED:
        expects.compiled("there is nothing to compute where they come to nothing")
    compiled = vitrify.compile(PROGRAMS[program])
    same(use(compiled, leaf, [history] * 2), use(PROGRAMS[program], leaf, [history] * 2))


@pytest.mark.eager(GOES_ON, "a placeholder has no gradient", some=True)
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_later_calls(program, leaf):
    """A plan of a call without such a history served those that have one."""
    if program in UNUSED:
        expects.compiled("there is nothing to compute where they come to nothing")
    histories = ["of neither", "of neither", "of x", "of W", "of both", "of neither"]
    compiled = vitrify.compile(PROGRAMS[program])
    same(use(compiled, leaf, histories), use(PROGRAMS[program], leaf, histories))


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("program", ["product", "kept graph", "both", "view", "weight"])
def test_histories_of_their_own(program, leaf):
    """Where none leads there, nothing runs eagerly."""
    compiled = vitrify.compile(PROGRAMS[program], fullgraph=True)
    same(use(compiled, leaf, ["of neither"] * 3), use(PROGRAMS[program], leaf, ["of neither"] * 3))
    assert vitrify.counters["captures"] == 1


@pytest.mark.eager(GOES_ON)
@pytest.mark.parametrize("given", ["x", "features", "neither"])
def test_captured(given):
    results = []
    for make in (vitrify.compile, lambda f: f):
        x = torch.linspace(1, 2, 4, dtype=torch.float64, requires_grad=True)
        y = x.sin()
        program = {"x": lambda x: grad((y * x).sum(), x, retain_graph=True)[0], "features": lambda y: grad((y * x).sum(), x, retain_graph=True)[0],
                   "neither": lambda z: grad((z * y * x).sum(), x, retain_graph=True)[0]}[given]
        f = make(program)
        results.append([f({"x": x, "features": y, "neither": y * 2}[given]) for _ in range(2)])
    same(*results)


ASKED_OF_FOUND = {
    "product": lambda x, h: grad((x * h).sum(), [h], retain_graph=True)[0],
    "the argument alone": lambda x, h: grad(x.sum() * 2, [h], allow_unused=True, retain_graph=True)[0],
    "kept graph": lambda x, h: grad((x * x * h).sum(), [h], create_graph=True)[0],
    "a view": lambda x, h: grad((x.view(4) * h).sum(), [h], retain_graph=True)[0],
    "an edge": lambda x, h: grad((x * h).sum(), [get_gradient_edge(h)], retain_graph=True)[0],
}
GIVEN_BESIDE_FOUND = {"follows": lambda h: h * 2, "follows by a view": lambda h: h.view(2, 2).t().reshape(4), "does not": lambda h: W.sin()}


@pytest.mark.eager(GOES_ON, some=True)
@pytest.mark.parametrize("order", [("follows",) * 2, ("does not", "follows", "follows by a view"), ("follows by a view", "does not")], ids=", ".join)
@pytest.mark.parametrize("program", ASKED_OF_FOUND)
def test_what_is_found_has_a_history(program, order):
    """The path from the argument to what the program finds, whose history is its own, was cut off as too short."""
    results = []
    for make in (vitrify.compile, lambda f: f):
        h = W * 3
        f = make(lambda x: ASKED_OF_FOUND[program](x, h))  # noqa: B023
        results.append(plain(tuple(f(GIVEN_BESIDE_FOUND[given](h)) for given in order)))
    same(*results)


@pytest.mark.eager(GOES_ON)
def test_hooks_and_freed_graphs():
    """Eager runs the hooks on that history, and frees it."""
    results = []
    for make in (vitrify.compile, lambda f: f):
        x = torch.linspace(1, 2, 4, dtype=torch.float64, requires_grad=True)
        h = x.exp()
        h.register_hook(lambda g: g * 10)
        y = h * h
        f = make(lambda y, x: grad((y * x).sum(), x)[0])
        results.append([f(y, x)])
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()
    same(*results)


@pytest.mark.eager("hooks of an argument see gradients")
@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_hooks_of_the_argument(first, leaf):
    """Placeholders have none of them: gradients came back as if the argument had none either."""
    results = []
    for make in (vitrify.compile, lambda f: f):
        f, got = make(lambda x: grad((x * x).sum(), x, retain_graph=True)[0]), []
        for hooked in (first, True):
            x = torch.linspace(1, 2, 4, dtype=torch.float64, requires_grad=True)
            x = x if leaf else x * 1
            if hooked:
                x.register_hook(lambda g: g * 10)
                if not leaf:
                    x.retain_grad()
            got += [f(x), None if leaf or not hooked else x.grad]
        results.append(got)
    same(*results)
