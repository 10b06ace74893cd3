"""What a program changes of a tensor by no op: the .data, the attributes and the .grad of a gradient, of what a tensor is a view of, of a parameter of a subclass, of a
result; the dtype of gradients. A capture left its placeholders there, and later calls did nothing."""
import pytest
import torch
import vitrify
from torch import nn


class Own(nn.Parameter):
    pass


def put(o, name, value):
    setattr(o, name, value)


def fresh(name):
    o = {"p": nn.Parameter(torch.ones(2)), "own": Own(torch.ones(2)), "b": torch.arange(4.0), "u": torch.full((2,), 9.0), "leaf": torch.ones(2, requires_grad=True)}
    o["w"] = o["b"][1:]
    o["n"] = o["leaf"] * 3 if "no leaf" in name else o["leaf"]
    if "no leaf" in name:
        o["n"].retain_grad()
    for k in ("p", "own", "n"):
        o[k].grad = torch.full((2,), 5.0)
    return o


PROGRAMS = {
    "halved": lambda o, x: put(o["p"].grad, "data", o["p"].grad.data / 2), "clipped": lambda o, x: put(o["p"].grad, "data", o["p"].grad.data.clamp(-1, 1)), "the same": lambda o, x: put(o["p"].grad, "data", o["p"].grad.data),
    "another's": lambda o, x: put(o["p"].grad, "data", o["u"]), "of an argument": lambda o, x: put(x.grad, "data", x.grad.data / 2), "of a base": lambda o, x: put(o["w"]._base, "data", torch.zeros(4)),
    "of a subclass": lambda o, x: put(o["own"], "data", o["own"].data * 2), "another's, of a subclass": lambda o, x: put(o["own"], "data", o["u"]), "an attribute": lambda o, x: put(o["p"].grad, "scaled", True),
    "requires_grad": lambda o, x: o["p"].grad.requires_grad_(), "a version": lambda o, x: torch.autograd.graph.increment_version(o["p"].grad), "a class": lambda o, x: put(o["u"], "__class__", nn.Parameter),
    "a gradient's gradient": lambda o, x: put(o["p"].grad, "grad", x.detach() * 2), "an argument's gradient's": lambda o, x: put(x.grad, "grad", x.detach() * 2), "of no leaf": lambda o, x: put(o["n"], "grad", x.detach() * 2),
    "of no leaf, another": lambda o, x: put(o["n"], "grad", o["u"]), "of no leaf, none": lambda o, x: put(o["n"], "grad", None), "by its other name": lambda o, x: put(o["p"], "_grad", x.detach() * 2),
    "a dtype": lambda o, x: (put(o["p"], "grad", None), put(o["p"], "grad_dtype", torch.float64)), "an argument's dtype": lambda o, x: (put(x, "grad", None), put(x, "grad_dtype", torch.float64)), "in place": lambda o, x: o["p"].grad.div_(2), "by data, in place": lambda o, x: o["u"].data.mul_(2),
}
NATIVE = ("in place", "by data, in place")


def seen(t, depth=2):
    of = None if t is None else (t.tolist(), t._version, t.requires_grad, type(t).__name__, vars(t))
    return of and (*of, seen(t.grad if t.is_leaf or t.retains_grad else None, depth - 1) if depth else None, t.grad_dtype if t.is_leaf else None)


@pytest.mark.eager("it assigns to the .data", "it sets", "it may look at the .grad", "sets the .grad", "it changes the requires_grad", "it counts a write", "reads grad_dtype", "another name", "this tensor is a placeholder", some=True)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name):
    told = []
    for compiles in (False, True):
        o = fresh(name)
        f = lambda x: (PROGRAMS[name](o, x), x.detach() * 2)[1]  # noqa: B023, E731
        f = vitrify.compile(f, fullgraph=name in NATIVE) if compiles else f
        for n in range(3):
            if n == 2:
                o |= {k: v for k, v in fresh(name).items() if k in ("p", "u")}
            x = torch.ones(2, requires_grad=True)
            x.grad = torch.full((2,), 7.0)
            with torch.no_grad():
                told.append((compiles, f(x).tolist(), seen(x), *(seen(o[k]) for k in ("p", "own", "b", "u", "n")), o["p"].grad is not None and o["p"].grad.data_ptr() == o["u"].data_ptr()))
    assert [t[1:] for t in told[3:]] == [t[1:] for t in told[:3]]


@pytest.mark.eager("not a leaf", some=True)
def test_of_an_argument_that_is_no_leaf():
    told = []
    for compiles in (False, True):
        for value in (None, "u", "computed"):
            u, leaf = torch.full((2,), 9.0), torch.ones(2, requires_grad=True)
            f = lambda x: (put(x, "grad", x.detach() * 2 if value == "computed" else u if value else None), x.detach() * 2)[1]  # noqa: B023, E731
            f = vitrify.compile(f) if compiles else f
            for _ in range(2):
                x = leaf * 1
                x.retain_grad()
                x.grad = torch.full((2,), 7.0)
                with torch.no_grad():
                    told.append((f(x).tolist(), None if x.grad is None else x.grad.tolist()))
    assert told[6:] == told[:6]


MADE = {"a value": lambda x: x * 2, "detached": lambda x: x.detach(), "a part": lambda x: x[:2], "zeros": lambda x: torch.zeros(4)}


@pytest.mark.eager("it returns a tensor whose .grad it has set")
@pytest.mark.parametrize("name", MADE)
def test_of_a_result(name):
    def f(x):
        y = MADE[name](x)
        y.grad = y * 3
        return y
    for g in (f, vitrify.compile(f)):
        for _ in range(2):
            with torch.no_grad():
                y = g(torch.arange(4.0))
            assert y.grad.tolist() == (y * 3).tolist()


TAKES = {
    "backward": lambda x, w: ((x * w).sum().backward(), x.detach() * 2)[1], "grad": lambda x, w: torch.autograd.grad((x * w * w).sum(), [x, w]), "none": lambda x, w: (x * w).sin(),
}


@pytest.mark.eager("have another dtype (grad_dtype)", "gradients that are there from the first call on", some=True)
@pytest.mark.parametrize("way", ["given", "captured"])
@pytest.mark.parametrize("name", TAKES)
def test_gradients_of_another_dtype(name, way):
    told = []
    for compiles in (False, True):
        x, w = torch.ones(3, requires_grad=True), torch.full((3,), 0.5, requires_grad=True)
        f = (lambda x, w: TAKES[name](x, w)) if way == "given" else (lambda w: TAKES[name](x, w))  # noqa: B023
        f = vitrify.compile(f) if compiles else f
        for dtype in (torch.float32, torch.float64, torch.float32, None):
            x.grad = w.grad = None
            x.grad_dtype = dtype
            out = f(x, w) if way == "given" else f(w)
            if name == "none":
                out.sum().backward()
            told.append([t.dtype for t in (out if isinstance(out, tuple) else (out,))] + [None if t.grad is None else t.grad.dtype for t in (x, w)])
    assert told[4:] == told[:4]
