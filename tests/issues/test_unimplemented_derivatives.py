"""What has no derivative raises when a backward comes to it, with eager's error, and only then: everything else of such a program is compiled."""
import warnings

import expects
import pytest
import torch
import vitrify
from compare import same
from torch.autograd import Function

Tensor = torch.Tensor


class Some(Function):
    """Gives nothing for a result that nobody used."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x.sin()

    @staticmethod
    def backward(ctx, g, h):
        return None if g is None else g * 2


def gradients_inside(x, y):
    h = torch.heaviside(x.sin(), y)
    return torch.autograd.grad(h.pow(3).sum(), h, create_graph=True)[0], x * 2


PROGRAMS = {
    "nextafter": lambda x, y: (torch.nextafter(x.sin(), y) + 1, x * 2),
    "itself": lambda x, y: (torch.nextafter(x.sin(), y), x * 2),
    "floor_divide": lambda x, y: (torch.floor_divide(x.sin(), y) + 1, x * 2),
    "heaviside": lambda x, y: (torch.heaviside(x.sin(), y) + 1, x * 2),
    "unique": lambda x, y: (torch.unique(x.sin()) + 1, x * 2),
    "unique_consecutive": lambda x, y: (torch.unique_consecutive(x.sin()) + 1, x * 2),
    "written since": lambda x, y: (torch.nextafter(x.sin(), y).addcmul_(x, x).exp_().mul_(2), x * 2),
    "beside others": lambda x, y: (torch.nextafter(x.sin(), y) * x.exp(), x * y),
    "of both": lambda x, y: (torch.nextafter(x.sin(), y.cos()).exp(), x * y),
    "in front of it": lambda x, y: (lambda h: (torch.nextafter(h, y) + 1, h))(x.sin()),
    "gradients inside": gradients_inside,
}


def outcome(f):
    try:
        return f()
    except Exception as e:
        return type(e), str(e)


def steps(f, y_needs):
    told = []
    def given():
        x, y = (torch.arange(6.0) - 2).reshape(2, 3).requires_grad_(), torch.linspace(-1, 3, 6).reshape(2, 3).requires_grad_(y_needs)
        return (x, y), f(x, y)
    for which in (1, 0, None):
        (x, y), out = given()
        told.append([(o.detach(), o.requires_grad, o.is_leaf) for o in out])
        def backward():
            (sum(o.sum() for o in out) if which is None else out[which].sum()).backward()
        told.append(outcome(backward))
        told.append([x.grad, y.grad])
        if which is not None:  # what it has not come to, it can come to yet
            told += [outcome(lambda: torch.autograd.grad(out[1 - which].sum(), x, allow_unused=True)), x.grad]
    for inputs in ((0,), (1,)) if y_needs else ((0,),):
        for which in (0, 1):
            leaves, out = given()
            told.append(outcome(lambda: torch.autograd.grad(out[which].sum(), [leaves[i] for i in inputs], allow_unused=True)))
    (x, y), out = given()
    first = outcome(lambda: torch.autograd.grad((out[1] * out[1].detach()).pow(2).sum(), x, create_graph=True))
    told.append(first)
    if isinstance(first[0], Tensor):
        told.append(outcome(lambda: torch.autograd.grad((first[0] * x).sum(), x)))
    return told


@pytest.mark.parametrize("y_needs", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name, y_needs):
    with warnings.catch_warnings():
        warnings.simplefilter("error", vitrify.VitrifyWarning)
        same(steps(vitrify.compile(PROGRAMS[name]), y_needs), steps(PROGRAMS[name], y_needs))


def test_gradients_that_may_be_none():
    """Behind a user's own node it depends on what that gives: as eager has it."""
    def program(x):
        a, b = Some.apply(torch.special.zeta(x.sin() + 2, x.detach()))
        return a, b, x * 2

    expects.eager("the derivative for 'zeta' is not implemented")
    told = []
    for f in (program, vitrify.compile(program)):
        for which in (0, 1, 2):
            x = torch.ones(3, requires_grad=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                told += [outcome(lambda: f(x)[which].sum().backward()), x.grad]
    same(told[6:], told[:6])


def test_where_only_one_operand_has_none():
    """igamma has a derivative for its second operand alone: whether the other is asked for decides."""
    expects.eager("the derivative for 'igamma: input' is not implemented", some=True)
    told = []
    def program(x, y):
        return torch.special.gammainc(x.exp(), y.exp()) + 1, x * y
    for f in (program, vitrify.compile(program)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for asked in ((0,), (1,), (0, 1)):
                for needs in ((True, True), (False, True), (True, False)):
                    leaves = [torch.ones(3).requires_grad_(n) for n in needs]
                    out = f(*leaves)
                    told.append(outcome(lambda: torch.autograd.grad(out[0].sum(), [leaves[i] for i in asked])))
    half = len(told) // 2
    same(told[half:], told[:half])


def written_after(x, y):
    v = y.exp()
    w = torch.floor_divide(x, x.abs() + 1) * 2
    return w, v.add_(1)


def written_before(x, y):
    v = y.exp()
    v.add_(1)
    return torch.floor_divide(x, x.abs() + 1) * 2, v * 1


def read_between(x, y):
    v = y.exp()
    w, u = torch.heaviside(x, x.abs() + 1) * 2, v * 3
    v.add_(1)
    return w, u


@pytest.mark.parametrize("f", [written_after, written_before, read_between], ids=lambda f: f.__name__)
def test_which_of_two_errors_comes_first(f):
    """Eager takes turns in parts that ours runs one after the other: the other error came."""
    def run(f):
        x, y = (torch.full((3,), 2.0, requires_grad=True) for _ in range(2))
        with pytest.raises(RuntimeError) as e:
            sum(t.sum() for t in f(x, y)).backward()
        return str(e.value)
    expects.eager("is not implemented", "modified by an inplace operation", some=True)
    assert run(vitrify.compile(f)) == run(f)


LED_TO = {
    "nextafter": lambda x, y: (torch.nextafter(y, y.abs() + 1), x * y), "floor_divide": lambda x, y: (torch.floor_divide(y, y.abs() + 1), x * y), "behind another": lambda x, y: (torch.nextafter(y.sin(), y) * 2, x.sin() * y),
    "of both": lambda x, y: (torch.heaviside(y, x), x * y), "three": lambda x, y: (torch.nextafter(y, y + 1), x * y, x.sin()), "written": lambda x, y: ((y * 2).floor_divide_(y + 3), x * y),
}


@pytest.mark.parametrize("name", LED_TO)
def test_what_it_does_not_lead_to(name):
    """Results that go on together, of which one cannot: a backward that asks for what it does not lead to never comes there."""
    def told(f):
        r = []
        for which in ([0], [1], [0, 1], [1, 0]):
            for to in ([0], [1], [0, 1]):
                for way in ("grad", "backward"):
                    leaves = [torch.linspace(1, 2, 3, requires_grad=True) for _ in range(2)]
                    out = f(*leaves)
                    loss, asked = [out[i].sum() for i in which], [leaves[i] for i in to]
                    r.append(outcome(lambda: torch.autograd.grad(loss, asked, allow_unused=True) if way == "grad" else torch.autograd.backward(loss, inputs=asked)))
                    r.append([t.grad for t in leaves])
        return r
    same(told(vitrify.compile(LED_TO[name], fullgraph=True)), told(LED_TO[name]))
