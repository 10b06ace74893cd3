"""Derivatives that read more than the first one through all results, and what is assigned to in between: they read what eager has saved."""
import contextlib
import sys
from pathlib import Path

import pytest
import torch
import vitrify
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from gradients import OnlyWithout, Stop, leaf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
EXACT = {"rtol": 1e-9, "atol": 1e-10}


def matrix(seed):
    return (leaf(3, 3, seed=seed, dtype=torch.float64).detach() + torch.eye(3, dtype=torch.float64) * 2).requires_grad_()


def same(ours, eager):
    assert len(ours) == len(eager)
    for a, b in zip(ours, eager):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, **EXACT)


@pytest.fixture(autouse=True)
def native():
    before = dict(vitrify.counters)
    yield
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"] and vitrify.counters["eager_calls"] == before["eager_calls"]


# ATen's formulas read more where they are differentiated again.
OPS = {"solve": lambda w, x: torch.linalg.solve(w + x, x), "det": lambda w, x: torch.linalg.det(w + x) * x, "slogdet": lambda w, x: torch.linalg.slogdet(w @ x + x)[1] * x,
       "logdet": lambda w, x: torch.logdet(w @ w.mT + x * x) * x}


def in_place(w):
    with torch.no_grad():
        w.mul_(1.5)


def through_data(w):
    w.data.mul_(1.5)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("change", [None, in_place, through_data])
@pytest.mark.parametrize("name", OPS)
def test_of_formulas_that_are_differentiated_again(name, change, dynamic):
    found = []
    for f in (vitrify.compile(OPS[name], dynamic=dynamic), OPS[name]):
        w, x = matrix(1), matrix(2)
        y = f(w, x)
        if change:
            change(w)
        try:
            first = torch.autograd.grad(y.sum(), (w, x), create_graph=True)
            found.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (w, x))])
        except RuntimeError as e:
            assert "modified by an inplace operation" in str(e)
            found.append([])
    same(*found)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("op", [torch.linalg.solve, lambda w, x: torch.linalg.det(w) * x, lambda w, x: torch.linalg.slogdet(w)[1] * x])
def test_of_an_argument_whose_data_is_assigned(op, create_graph):
    found = []
    for f in (vitrify.compile(op), op):
        w, x = matrix(1), matrix(2)
        y = f(w, x)
        w.data = w.detach() * 1.1
        found.append(torch.autograd.grad(y.sum(), (w, x), create_graph=create_graph))
    same(*found)


class OnlySome(OnlyWithout):
    """Or where one of its results has none."""
    @staticmethod
    def forward(ctx, y):
        return OnlyWithout.forward(ctx, y), y * 3

    @staticmethod
    def backward(ctx, g, h):
        e, = ctx.saved_tensors
        return h * e if g is None else g * 2


@pytest.mark.parametrize("written", ["", "x", "w"])
@pytest.mark.parametrize("f, loss", [(lambda x, w: (OnlyWithout.apply(x * w), x * 2), lambda a, b: Stop.apply(a).sum() + b.sum()),
                                     (lambda x, w: OnlySome.apply(x * w), lambda a, b: b.sum())], ids=["without", "some"])
def test_of_a_function_that_reads_it_where_a_gradient_is_missing(f, loss, written):
    found = []
    for g in (vitrify.compile(f), f):
        x, w = (leaf(3, seed=s, dtype=torch.float64) for s in (1, 2))
        out = loss(*g(x, w))
        if written:
            {"x": x, "w": w}[written].data.mul_(2)
        out.backward()
        found.append((x.grad, w.grad))
    same(*found)


LAID = {"plain": lambda v: v, "transposed": lambda v: v.t(), "every other": lambda v: torch.stack([v, v], -1).flatten(1)[:, ::2], "expanded": lambda v: v[:, :1].expand(3, 3)}


@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("laid", LAID)
def test_of_a_gradient_whose_data_is_assigned(laid, needs):
    """Where it was copied the backward says so: eager reads the other memory."""
    def f(x):
        return (x @ x).exp().sin()
    found = []
    for g in (vitrify.compile(f), f):
        x, v = matrix(1), LAID[laid](matrix(2).detach()).detach().requires_grad_(needs)
        first, = torch.autograd.grad(g(x), x, v, create_graph=True)
        v.data = v.detach() * 3
        if g is not f and laid == "expanded":
            with pytest.raises(RuntimeError, match=r"the .data of a gradient was assigned to .* write to it in place"):
                torch.autograd.grad(first.sum(), x)
            return
        found.append(torch.autograd.grad(first.sum(), (x, v) if needs else x))
    same(*found)


def test_of_a_gradient_of_a_result_whose_data_is_assigned():
    def f(x):
        k = x.exp()
        return k, k.sin()
    found = []
    for g in (vitrify.compile(f), f):
        x = leaf(4, seed=1, dtype=torch.float64)
        k, out = g(x)
        of_k, of_x = torch.autograd.grad(out.sum(), (k, x), create_graph=True)
        of_k.data = of_k.detach() * 3
        found.append(torch.autograd.grad(of_x.sum(), (x, k)))
    same(*found)


def test_in_other_strides_three_times():
    found = []
    for f in (vitrify.compile(lambda x: x @ x @ x), lambda x: x @ x @ x):
        x = matrix(1)
        out, grads = f(x).sum(), []
        x.data = x.detach().t().contiguous().t()
        for _ in range(3):
            g, = torch.autograd.grad(out, x, create_graph=True)
            grads.append(g.detach())
            out = g.square().sum()
        found.append(grads)
    same(*found)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_in_other_strides_from_hooks(dynamic):
    def f(x, w):
        return ((x.t() * w.t()).exp() @ x).sin() + (x.t() * 2).tanh()
    pack = vitrify.mark_lossless(lambda t: t.detach().numpy().copy())
    unpack = vitrify.mark_lossless(torch.from_numpy)
    found = []
    for g in (vitrify.compile(f, dynamic=dynamic), f):
        x, w = matrix(1), matrix(2)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = g(x, w).sum()
            first = torch.autograd.grad(out, (x, w), create_graph=True)
            found.append([*first, *torch.autograd.grad(sum(t.square().sum() for t in first), (x, w))])
    same(*found)


@pytest.mark.parametrize("f", [torch.prod, lambda x: x.cumprod(0), lambda x: torch.linalg.det(x.outer(x) + torch.eye(4)), lambda x: x.topk(3)[0].prod()])
def test_looked_at_within_a_checkpoint(f):
    """The checkpoint computes it again by the compiled function, before the derivative is recorded."""
    found = []
    for g in (vitrify.compile(f), f):
        x = leaf(4, seed=1, dtype=torch.float64)
        first, = torch.autograd.grad(checkpoint(g, x.sin(), use_reentrant=False).sum(), x, create_graph=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), x)))
    same(*found)


class Looks(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("under", [(0,), (1,), (0, 1), (1, 2)])
@pytest.mark.parametrize("f", [lambda x, w: ((x * w).exp(), (x * w).exp().sin() * w), lambda x, w: ((x * 2).sin(), (w * x).exp())], ids=["dependent", "independent"])
def test_under_a_mode(f, under):
    compiled, found = vitrify.compile(f), []
    for g in (compiled, compiled, f):
        x, w = (leaf(8, seed=s, dtype=torch.float64) for s in (1, 2))
        out, told = g(x, w)[-1].square().sum(), []
        for i in range(3):
            with Looks() if i in under else contextlib.nullcontext():
                grads = torch.autograd.grad(out, (x, w), create_graph=True)
            told += [t.detach() for t in grads]
            out = sum(t.square().sum() for t in grads)
        found.append(told)
    same(found[0], found[2])
    same(found[1], found[2])


def test_three_derivatives_of_what_hooks_give_back():
    """What hooks give back needs no gradient: that says nothing of the tensor that they were given."""
    def f(x, w):
        return (x * w * w).sin()
    same_again = vitrify.mark_lossless(lambda t: t)
    found = []
    for g in (vitrify.compile(f), f):
        x, w = (leaf(3, seed=s, dtype=torch.float64) for s in (1, 2))
        with torch.autograd.graph.saved_tensors_hooks(same_again, same_again):
            y = g(x, w).sum()
        first, = torch.autograd.grad(y, w, create_graph=True)
        second, = torch.autograd.grad(first.square().sum(), w, create_graph=True)
        found.append((first, second, *torch.autograd.grad(second.sum(), (x, w))))
    same(*found)
