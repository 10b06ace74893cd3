"""The program's own grad() or backward() frees the graph that it goes through: results that follow from it need gradients, and a backward that comes to them raises."""
import pytest
import torch
import vitrify
from compare import same
from torch.autograd import grad


def energy(*returned):
    def f(x, w):
        y = (x * w).sin()
        g, = grad(y.sum(), x)
        of = {"energy": y * 2, "itself": y, "other": x * w, "one of w": w.exp(), "gradient": g, "sum": y * 2 + x, "zeros": y * 0 + 1, "penalty": (x - w).pow(2), "beyond": (y + w).exp()}
        out = tuple(of[name] for name in returned)
        return out if len(out) > 1 else out[0]
    return f


def of_one(x, w):
    y = x.sin().exp()
    g, = grad(y.sum(), x)
    return y * 2, w * 2


def twice(x, w):
    y, z = (x * w).sin(), (x + w).exp()
    grad(y.sum() + z.sum(), x)
    return y * 2, z * 2, x * w


def backwards(x, w):
    h = (x * w).detach().requires_grad_()
    y = h.sin().exp()
    y.sum().backward()
    return y * 2, x * 2


def in_part(x, w):
    """From w there is another way to it."""
    y = x.sin()
    grad(y.sum(), x)
    return y * w, w * 2


PROGRAMS = {" ".join(names): energy(*names) for names in [
    ("energy",), ("itself",), ("other", "itself"), ("other", "energy"), ("energy", "other"), ("sum",), ("gradient", "zeros"), ("one of w", "zeros"), ("energy", "penalty"), ("energy", "itself", "other"),
    ("other", "beyond")]}
PROGRAMS |= {"of one": of_one, "two": twice, "by its leaf": backwards, "in part": in_part}


def outcome(f):
    try:
        return f()
    except RuntimeError as e:
        return type(e), str(e).partition(" (")[0]


@pytest.mark.eager("on the way to some inputs, and not to others", some=True)
@pytest.mark.parametrize("w_needs", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results(name, w_needs):
    def told(f):
        r = []
        def made():
            x, w = torch.tensor([0.5, 1.0, 2.0], requires_grad=True), torch.tensor([1.0, 2.0, 3.0], requires_grad=w_needs)
            out = f(x, w)
            return (x, w), out if isinstance(out, tuple) else (out,)
        for _ in range(2):
            leaves, out = made()
            r.append([(o.detach(), o.requires_grad, o.is_leaf) for o in out])
            needed = [t for t in leaves if t.requires_grad]
            for o in out:
                if o.requires_grad:
                    for of in (needed, *([t] for t in needed)):
                        r.append(outcome(lambda: grad(o.sum(), of, retain_graph=True, allow_unused=True)))
            leaves, out = made()
            r.append(outcome(lambda: sum(o.sum() for o in out).backward()))
            r.append([t.grad for t in leaves])
        return r
    same(told(vitrify.compile(PROGRAMS[name])), told(PROGRAMS[name]))


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * torch.rand_like(g)


@pytest.mark.eager("draws or has effects in other backwards")
def test_what_no_backward_of_the_program_has_drawn():
    """Whether a result is spent was tried in the forward, which drew."""
    def f(x, w):
        grad(w.sin().sum(), w)
        return Draws.apply(x * w).exp()
    told = []
    for g in (vitrify.compile(f), f):
        x, w = (torch.linspace(0.5, 2, 4).requires_grad_() for _ in range(2))
        torch.manual_seed(5)
        y = g(x, w)
        told.append([y.detach(), torch.get_rng_state(), *grad(y.sum(), (x, w)), torch.get_rng_state()])
    same(*told)


def test_a_written_view_beside_it():
    """The way to the view was asked for behind the write, and then was that to what it had been."""
    def f(h, w):
        h.exp_()
        y = h * w
        grad(y.sum(), w)
        return y
    told = []
    for g in (vitrify.compile(f), f):
        x, w = (torch.linspace(0.5, 2, 4).requires_grad_() for _ in range(2))
        for view in (lambda b: b.view(4), lambda b: b[1:3], lambda b: b.view(2, 2).t()[:, 0]):
            b = x * 1
            h = view(b)
            g(h, w[:h.numel()])
            told.append([*grad(h.sum(), x, retain_graph=True), *grad(b.sum(), x)])
    same(told[:3], told[3:])


@pytest.mark.eager("writes what its backward() went through")
def test_what_is_written_and_gone_through():
    """The argument kept the history of before the write."""
    def f(h, w):
        h.mul_(w).exp_()
        grad(h.sum(), w)
    told = []
    for g in (vitrify.compile(f), f):
        x, w = (torch.linspace(0.5, 2, 4).requires_grad_() for _ in range(2))
        h = x * 1
        g(h, w)
        told.append([h.detach(), h.requires_grad, outcome(lambda: grad(h.sum(), x))])
    same(*told)
    vitrify.compile(lambda x: x + 1)(torch.ones(2))
