"""A tensor that a call is given and that the program also reaches by itself (a module's own buffer, a gradient): written by the one way, it is read by the other. And
gradients that are found by their owners, which may have one in common in some calls."""
import expects
import pytest
import torch
import vitrify
from torch import nn
from torch.utils.checkpoint import checkpoint

CHANGED = "which is of the same memory"
BOTH = "shares memory with input"


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("h", torch.ones(3))

    def forward(self, x, h=None):
        h = self.h if h is None else h
        h.mul_(0.5).add_(x)
        return self.h * 1


WRITTEN = {
    "read after": lambda x, w: (x.mul_(2), w * 1)[1], "by detach": lambda x, w: (x.detach().mul_(2), w * 1)[1], "by data": lambda x, w: (x.data.add_(2), w + x)[1], "read before": lambda x, w: (lambda y: (x.mul_(2), y + w)[1])(w + 1), "the captured": lambda x, w: (w.mul_(2), x * 1)[1],
    "out=": lambda x, w: (torch.add(x, 1, out=x), w * 2)[1], "by a view": lambda x, w: (x[1:].zero_(), w.sum())[1], "foreach": lambda x, w: (torch._foreach_mul_([x], 2), w.exp())[1], "reshaped": lambda x, w: (x.unsqueeze_(0), w + 1)[1], "drawn": lambda x, w: (x.normal_(), w.cumsum(0))[1],
    "mask": lambda x, w: (x.sub_(1), w[w > 0])[1],
}


@pytest.mark.eager(CHANGED, BOTH, "an argument shares memory with one that is written", some=True)
@pytest.mark.parametrize("order", ["itself first", "itself last", "a view first"])
@pytest.mark.parametrize("name", WRITTEN)
def test_written(name, order):
    seen = []
    for compiles in (False, True):
        torch.manual_seed(0)
        base = torch.arange(1.0, 9.0)
        w = base[:4]
        f = lambda x: WRITTEN[name](x, w)  # noqa: B023, E731
        f = vitrify.compile(f) if compiles else f
        told = []
        with torch.no_grad():
            for which in {"itself first": "woww", "itself last": "oow", "a view first": "vwov"}[order]:
                x = w if which == "w" else base[4:] if which == "v" else torch.ones(4)
                if name == "reshaped" and which != "o" and w.dim() > 1:
                    continue
                told += [f(x).clone(), w.clone(), x.clone()]
        seen.append(told)
    torch.testing.assert_close(*seen)


@pytest.mark.eager(CHANGED, BOTH, some=True)
def test_a_buffer_of_the_module():
    seen = []
    for compiles in (False, True):
        m = Step()
        f = vitrify.compile(m) if compiles else m
        with torch.no_grad():
            seen.append([f(torch.ones(3), m.h), f(torch.ones(3)), f(torch.ones(3), torch.zeros(3)), f(torch.ones(3), m.h), m.h.clone()])
    torch.testing.assert_close(*seen)


SOUGHT = {
    "the captured": lambda x, w: torch.autograd.grad((x * x).sum(), w, allow_unused=True)[0], "the argument": lambda x, w: torch.autograd.grad((w * x).sum(), x)[0], "of both": lambda x, w: torch.autograd.grad((w * x).sum(), w)[0],
}


@pytest.mark.eager("goes back to", "also reaches by itself", some=True)
@pytest.mark.parametrize("order", ["wvw", "vwv", "vvw"])
@pytest.mark.parametrize("name", SOUGHT)
def test_gradients_within_the_call(name, order):
    seen = []
    for compiles in (False, True):
        w, v = torch.arange(1.0, 4.0).requires_grad_(), torch.ones(3).requires_grad_()
        f = lambda x: SOUGHT[name](x, w)  # noqa: B023, E731
        f = vitrify.compile(f) if compiles else f
        seen.append([f(w if which == "w" else v) for which in order])
    torch.testing.assert_close(*seen)


def asked(program, weights, seen):
    for w in weights:
        w.grad = None
    got = program(torch.full((2, 3), 0.5 + 0.25 * len(seen), dtype=torch.float64))
    seen.append([None if t is None else t.detach().clone() for t in (*(got if isinstance(got, tuple) else (got,)), *(w.grad for w in weights))])


ASKED = {
    "backward": lambda m, x, ps: m(x).pow(2).sum().backward(inputs=ps),
    "grad": lambda m, x, ps: torch.autograd.grad(m(x).pow(2).sum(), ps, allow_unused=True),
    "create_graph": lambda m, x, ps: sum((g.pow(2).sum() for g in torch.autograd.grad(m(x).pow(2).sum(), ps, create_graph=True, allow_unused=True) if g is not None), x.sum() * 0),
    "edges": lambda m, x, ps: torch.autograd.grad(m(x).sum(), [torch.autograd.graph.get_gradient_edge(p) for p in ps], allow_unused=True),
    "batched": lambda m, x, ps: torch.autograd.grad(m(x).squeeze(1), ps, torch.eye(2, dtype=x.dtype), is_grads_batched=True, allow_unused=True),
    "checkpoint": lambda m, x, ps: checkpoint(m, x, use_reentrant=False).pow(2).sum().backward(inputs=ps),
    "Function": lambda m, x, ps: torch.autograd.grad(Scaled.apply(x @ m.weight.t()).sum(), ps[:1], allow_unused=True),
    "a step": lambda m, x, ps: (m(x).pow(2).sum().backward(inputs=ps), torch.no_grad()(lambda: [p.sub_(0.1 * p.grad) for p in ps if p.grad is not None])(), m.weight * 1)[2],
}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


@pytest.mark.eager("goes back to", "may go back to an argument", "reads or sets a .grad", "is missing in a first call", some=True)
@pytest.mark.parametrize("order", ["mm", "om", "mom"])
@pytest.mark.parametrize("name", ASKED)
def test_gradients_by_what_it_is_given(name, order):
    """`m(x).sum().backward(inputs=params)`: what the program finds, and what it is given of it, were two leaves, and no gradient came to the second."""
    told = []
    for make in (vitrify.compile, lambda f: f):
        torch.manual_seed(0)
        m, other, seen = nn.Linear(3, 1).double(), nn.Linear(3, 1).double(), []
        f = make(lambda x, ps: ASKED[name](m, x, ps))  # noqa: B023
        for which in order:
            given = list((m if which == "m" else other).parameters())
            asked(lambda x: f(x, given), [*m.parameters(), *other.parameters()], seen)  # noqa: B023
        told.append(seen)
    assert [[t is None for t in c] for c in told[0]] == [[t is None for t in c] for c in told[1]]
    torch.testing.assert_close(*[[t for c in seen for t in c if t is not None] for seen in told])


@pytest.mark.eager("may go back to an argument")
@pytest.mark.parametrize("program", [lambda w, b, x: (lambda y: (y.sum().backward(inputs=[b]), y)[1])((x * w).exp()), lambda w, b, x: (lambda y: (torch.autograd.grad(y.sum(), [b], allow_unused=True), y)[1])((x * w).exp())])
def test_its_own_backward_frees_the_graph(program):
    w = torch.ones(3, requires_grad=True)
    for f in (vitrify.compile(lambda x, b: program(w, b, x)), lambda x, b: program(w, b, x)):
        y = f(torch.ones(3), w)
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()


def owner(n=3):
    v = nn.Parameter(torch.ones(n))
    (v * torch.arange(1.0, n + 1)).sum().backward()
    return v


RETURNED = {
    "alone": lambda v, x: v.grad, "beside a value": lambda v, x: (x * 2, v.grad), "in a list": lambda v, x: [v.grad, x + 1], "and its owner": lambda v, x: (v.grad, v), "assigned": lambda v, x: (setattr(x, "grad", v.grad), x * 2)[1], "and read": lambda v, x: (v.grad, v.grad * 2),
}


@pytest.mark.eager("sets the .grad", some=True)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("name", RETURNED)
def test_a_gradient_is_returned(name, mode):
    if name in ("alone", "and its owner"):
        expects.no_kernels("nothing is computed")
    seen = []
    for compiles in (False, True):
        v, x = owner(), torch.ones(3)
        f = lambda x: RETURNED[name](v, x)  # noqa: B023, E731
        f, told = vitrify.compile(f) if compiles else f, []
        for _ in range(2):
            with mode():
                out = f(x)
            out = list(out) if isinstance(out, (tuple, list)) else [out]
            told += [t.detach().clone() for t in out] + [any(t is v.grad for t in out), x.grad is v.grad]
            v.grad = torch.full((3,), 5.0)
        seen.append(told)
    torch.testing.assert_close(*seen)


TIES = {
    "two of one": (lambda a, b: (setattr(b, "grad", a.grad), None)), "untied": lambda a, b: setattr(b, "grad", torch.full((3,), 4.0)), "as they are": lambda a, b: None,
}
GRADIENTS = {
    "sum": lambda a, b, x: a.grad + b.grad, "scaled": lambda a, b, x: ([p.grad.mul_(0.5) for p in (a, b)], a.grad + b.grad)[1], "clipped": lambda a, b, x: nn.utils.clip_grad_norm_([a, b], 1.0), "beside a write": lambda a, b, x: (x.mul_(2), x + a.grad)[1],
}


@pytest.mark.eager("by another name as well", BOTH, some=True)
@pytest.mark.parametrize("order", [("two of one", "untied"), ("as they are", "two of one", "untied"), ("untied", "two of one")], ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_in_common(name, order):
    seen = []
    for compiles in (False, True):
        a, b = owner(), owner()
        f = lambda x: GRADIENTS[name](a, b, x)  # noqa: B023, E731
        f, told = vitrify.compile(f) if compiles else f, []
        for tie in order:
            TIES[tie](a, b)
            for x in (torch.ones(3), a.grad, torch.ones(3)):
                with torch.no_grad():
                    told += [f(x).clone(), a.grad.clone(), b.grad.clone()]
        seen.append(told)
    torch.testing.assert_close(*seen)


def assign(t, grad):
    t.grad = grad


SET = {
    "set, and read": lambda x, w: (assign(x, x.detach() * 2), x.detach() * 0 if w.grad is None else w.grad * 1)[1], "read, and set": lambda x, w: (assign(w, w.detach() * 3), x.detach() * 0 if x.grad is None else x.grad * 1)[1],
    "both, scaled": lambda x, w: ([assign(t, t.grad * 2) for t in (w, x) if t.grad is not None], x + w)[1], "one after the other": lambda x, w: (assign(w, w.detach() * 3), assign(x, x.detach() * 2), x + 1)[2],
    "set, and forgotten": lambda x, w: (assign(x, x.detach() * 2), assign(w, None), x * 1)[2], "forgotten": lambda x, w: (assign(x, None), w * (2 if w.grad is None else 3))[1],
    "by a backward": lambda x, w: ((x * x).sum().backward(), x.detach() * 0 if w.grad is None else w.grad * 1)[1], "by one, and forgotten": lambda x, w: ((x * x).sum().backward(), assign(w, None), x * 1)[2],
    "the other's": lambda x, w: (assign(x, w.grad), x * 1)[1], "exchanged": lambda x, w: (lambda g, h: (assign(x, h), assign(w, g), x * 1)[2])(x.grad, w.grad),
}


@pytest.mark.eager("sets the .grad", BOTH, "reads the .grad of an argument that it also reaches by itself", "reads or sets a .grad", "makes gradients that are there from the first call on", "by another name as well", "goes back to", some=True)
@pytest.mark.parametrize("have", ["both", "neither", "w"])
@pytest.mark.parametrize("order", ["wv", "vw", "wvw", "vvw", "wwv"])
@pytest.mark.parametrize("name", SET)
def test_gradients_are_set(name, order, have):
    seen = []
    for compiles in (False, True):
        w, v = (t.requires_grad_("by" in name) for t in (torch.ones(2), torch.zeros(2)))
        f = lambda x: SET[name](x, w)  # noqa: B023, E731
        f, told = vitrify.compile(f) if compiles else f, []
        for which in order:
            w.grad, v.grad = None if have == "neither" else torch.full((2,), 7.0), torch.full((2,), 3.0) if have == "both" else None
            told += [f(w if which == "w" else v).detach().clone(), *(None if t.grad is None else t.grad.clone() for t in (w, v)), w.grad is v.grad]
        seen.append(told)
    assert [None if t is None else t.tolist() if isinstance(t, torch.Tensor) else t for t in seen[1]] == [None if t is None else t.tolist() if isinstance(t, torch.Tensor) else t for t in seen[0]]


@pytest.mark.parametrize("when", ["before", "after the first call"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_captured_tensor_keeps_its_gradient(create_graph, when):
    """The placeholders of a derivative's capture were kept as its .grad."""
    seen = []
    for compiles in (False, True):
        leaf = torch.arange(1.0, 4.0).requires_grad_()
        w = leaf * 2
        f = lambda x: (x * w).sin()  # noqa: B023, E731
        f, told = vitrify.compile(f, fullgraph=True) if compiles else f, []
        if when == "before":
            w.retain_grad()
        for n in range(3):
            out = f(torch.ones(3) * n)
            told.append(w.grad is None if not n else w.grad.detach().clone())
            w.retain_grad()
            out.sum().backward(retain_graph=True, create_graph=create_graph)
            told += [w.grad.detach().clone(), leaf.grad.detach().clone()]
        seen.append(told)
    torch.testing.assert_close(*seen)
