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
