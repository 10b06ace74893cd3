"""A gradient that is None comes to a result behind which a user's Function lies: eager runs the Function, with zeros or with None, and what it gives counts."""
import sys
from pathlib import Path

import pytest
import torch
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from gradients import OnlyWithout, Square, Stop  # noqa: E402


class AddAux(torch.autograd.Function):
    """As in mixtures of experts: a loss that is added in the backward."""
    @staticmethod
    def forward(ctx, y, aux):
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        return g, torch.ones(())


class Regularised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        ctx.set_materialize_grads(False)
        return y.clone()

    @staticmethod
    def backward(ctx, g):
        y, = ctx.saved_tensors
        return .1 * y if g is None else g + .1 * y


PROGRAMS = {
    "one": lambda x, w: (Square.apply(x), w.sin()),
    "behind": lambda x, w: (Square.apply(x) * 2, w.sin()),
    "shared": lambda x, w: (lambda h: (h * 2, h.sin() * w))(Square.apply(x * w)),
    "aux": lambda x, w: (AddAux.apply(x * 2, (x * w).square().sum()), w.sin()),
    "aux beside": lambda x, w: (AddAux.apply(x * 2, x.square().sum()), x.sin() * w),
    "regularised": lambda x, w: (Regularised.apply(x * 2), x.sin() * w),
    "regularised shared": lambda x, w: (lambda h: (Regularised.apply(h) * w, h.cos()))((x * w).exp()),
    "two": lambda x, w: (AddAux.apply(Regularised.apply(x * w) * 2, w.sum()), Regularised.apply(w)),
    "in a row": lambda x, w: (lambda h: (h, Regularised.apply(h.sin())))(Regularised.apply(x * w) * 2),
    "only without": lambda x, w: (OnlyWithout.apply(x * w), x * 2),
    "view": lambda x, w: (Regularised.apply(x * w)[1:], x.sin()),
    "in place": lambda x, w: (Regularised.apply(x * w).mul_(2), x.sin()),
    "no Function": lambda x, w: ((x * w).exp(), w.sin()),
    "returned itself": lambda x, w: (lambda h: (h, h * 2))(Regularised.apply(x * w)),
}


def nothing(a, b, x, w):
    Stop.apply(a).sum().backward()


def nothing_twice(a, b, x, w):
    (Stop.apply(a).sum() + Stop.apply(b).sum()).backward()


def beside(a, b, x, w):
    (Stop.apply(a).sum() + b.sum()).backward()


def the_other(a, b, x, w):
    (a.sum() + Stop.apply(b).sum()).backward()


def retained(a, b, x, w):
    loss = Stop.apply(a).sum() + (b * b).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def two_losses(a, b, x, w):
    Stop.apply(a).sum().backward(retain_graph=True)
    (a.sum() + b.sum()).backward()


def second(a, b, x, w):
    Stop.apply(a).sum().backward()
    (a.sum() + b.sum()).backward()


def of_grad(a, b, x, w):
    x.grad, w.grad = torch.autograd.grad(Stop.apply(a).sum() + b.sum(), (x, w), allow_unused=True)


def of_one(a, b, x, w):
    w.grad, = torch.autograd.grad(Stop.apply(a).sum(), w, allow_unused=True)


def again(a, b, x, w):
    gx, gw = torch.autograd.grad(Stop.apply(a).sum() + (b * b).sum(), (x, w), create_graph=True, allow_unused=True)
    gs = [g for g in (gx, gw) if g is not None and g.requires_grad]
    if gs:
        sum(g.square().sum() for g in gs).backward()


WAYS = [nothing, nothing_twice, beside, the_other, retained, two_losses, second, of_grad, of_one, again]


def run(fn, way, n):
    x = torch.linspace(.5, 1.5, n, dtype=torch.float64).requires_grad_()
    w = torch.linspace(-1., 1., n, dtype=torch.float64).requires_grad_()
    error = None
    try:
        way(*fn(x, w), x, w)
    except RuntimeError as e:
        error = str(e)[:60]
    return x.grad, w.grad, error


@pytest.mark.sweep(5)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_none_comes_to_a_result(name, way, dynamic):
    fn = PROGRAMS[name]
    compiled = vitrify.compile(fn, dynamic=dynamic)
    before = dict(vitrify.counters)
    for n in (3, 3, 5) if dynamic else (3, 3):
        *ours, error = run(compiled, way, n)
        *eager, expected = run(fn, way, n)
        assert error == expected
        for a, b in zip(ours, eager):
            assert (a is None) == (b is None)
            if b is not None:
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
                assert a.stride() == b.stride()
    assert vitrify.counters["compiled_calls"] > before.get("compiled_calls", 0)
    assert vitrify.counters["eager_calls"] == before.get("eager_calls", 0)


def test_weight_decay_and_an_auxiliary_loss():
    """Without a gradient the optimizer left the weight alone."""
    def step(of):
        torch.manual_seed(0)
        m = torch.nn.Linear(3, 3)
        o = torch.optim.SGD(m.parameters(), .1, momentum=.9, weight_decay=.1)

        def f(x):
            h = m(x)
            return AddAux.apply(h, h.square().mean())
        f = of(f)
        for _ in range(3):
            o.zero_grad()
            Stop.apply(f(torch.ones(2, 3))).sum().backward()
            o.step()
        return m.weight.detach(), m.bias.detach()
    torch.testing.assert_close(step(vitrify.compile), step(lambda f: f))


def test_it_runs_once_in_a_backward():
    """The node of a Function that others' gradients went through is come to without one: nothing is added again."""
    def f(x, w):
        h = Regularised.apply(x * w)
        return h.sin(), h.cos(), h * 2
    compiled = vitrify.compile(f)
    for stopped in ((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)):
        found = []
        for g in (compiled, f):
            x, w = (torch.full((3,), v, dtype=torch.float64).requires_grad_() for v in (.5, .7))
            sum(Stop.apply(t).sum() if i in stopped else t.sum() for i, t in enumerate(g(x, w))).backward()
            found.append((x.grad, w.grad))
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 0.5

    @staticmethod
    def backward(ctx, g):
        return g * 0.5


PLACES = {"returned": lambda v, c: (v, c), "a view of it": lambda v, c: (v[0], c), "another": lambda v, c: (v * 1, c), "behind it": lambda v, c: (c,)}


@pytest.mark.parametrize("through", ["grad", "backward"])
@pytest.mark.parametrize("name", PLACES)
def test_none_of_a_second_derivative_comes_to_a_result(name, through):
    """A convolution's second derivative gives its input none: what the input follows from is come to all the same, also where users have it."""
    w = (torch.arange(16.).reshape(4, 4, 1).double() / 9).requires_grad_()

    def f(x):
        v = Halved.apply(x) + x
        return PLACES[name](v, torch.nn.functional.conv1d(v, w))
    compiled, before = vitrify.compile(f), dict(vitrify.counters)
    found = []
    for g in (compiled, f, compiled, f):
        x = (torch.arange(60.).reshape(3, 4, 5).double() / 50 + 0.1).requires_grad_()
        w.grad = None
        first, = torch.autograd.grad(sum(r.sum() for r in g(x)), x, create_graph=True)
        if through == "grad":
            found.append(torch.autograd.grad(first.square().sum(), (x, w), allow_unused=True))
        else:
            first.square().sum().backward()
            found.append((x.grad, w.grad))
    for ours, eager in zip(found[::2], found[1::2]):
        for a, b in zip(ours, eager, strict=True):
            assert (a is None) == (b is None)
            assert b is not None
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"] and vitrify.counters["eager_calls"] == before["eager_calls"]


class Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3 + 1


BETWEEN = {"before": lambda x, w: (lambda v: (w - x, v + Affine.apply(w)))(x.sin()), "behind": lambda x, w: (lambda a, v: (a, v + Affine.apply(w)))(w - x, x.sin()),
           "three": lambda x, w: (lambda v: (w * x, v + Affine.apply(w), v * 2))(x.sin()), "times": lambda x, w: (lambda v: (w * x, v * Affine.apply(w)))(x.sin())}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_nobody_comes_to_does_not_run(name):
    """A Function behind another result, in whichever order eager's nodes are made."""
    f = BETWEEN[name]
    compiled, before = vitrify.compile(f), dict(vitrify.counters)
    for i in (0, 1, 0):
        found = []
        for g in (compiled, f):
            x, w = torch.full((4, 5), .5).requires_grad_(), torch.full((1, 5), .7).requires_grad_()
            g(x, w)[i].sum().backward()
            found.append((x.grad, w.grad))
        torch.testing.assert_close(*found)
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"] and vitrify.counters["eager_calls"] == before["eager_calls"]
