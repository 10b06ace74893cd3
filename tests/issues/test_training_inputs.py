"""What eager asks of a tensor before it writes to it is no part of a signature; what a call under no_grad computes with gradients has them."""
import sys
from pathlib import Path

import pytest
import torch
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
import compare  # noqa: E402

REFUSED = "writes what gradients follow where eager may not"


def base():
    return torch.arange(1.0, 13).reshape(4, 3).requires_grad_()


def made_in_no_grad(t):
    with torch.no_grad():
        return t[:2]


class View(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g


PLAIN = {"no view": lambda: base()[:2] * 1, "a view": lambda: (base() * 1)[:2]}
OTHERS = {
    "a leaf": lambda: base().detach()[:2].clone().requires_grad_(),
    "a view of a leaf": lambda: base()[:2],
    "one of a split": lambda: (base() * 1).split(2)[0],
    "one of an unbind": lambda: (base() * 1).reshape(2, 2, 3).unbind(0)[1],
    "a view made without gradients": lambda: made_in_no_grad(base() * 1),
    "a view that a user's function made": lambda: View.apply(base()[:2] * 1),
}
WRITES = {
    "the whole": lambda x, w: x.mul_(w),
    "and another result": lambda x, w: (x.mul_(2), (x * w).sum())[1],
    "a row": lambda x, w: (x[0].add_(w[0]), x * 2)[1],
    "zeros": lambda x, w: (x.zero_(), x + w)[1],
    "through a view": lambda x, w: (x.view(-1)[:2].mul_(3), x.sin() * w)[1],
}


def called(f, x):
    w = torch.full((2, 3), 1.5, requires_grad=True)
    version = x._version
    try:
        out = f(x, w)
    except Exception as e:
        return compare.first_line(e), type(e), x.detach().clone(), x._version - version, x.is_leaf
    return out.detach(), torch.autograd.grad(out.sum(), w, allow_unused=True)[0], x.detach().clone(), x._version - version, x.is_leaf


def same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.eager(REFUSED, some=True)  # of a leaf the capture raises
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("plain", PLAIN)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_eager_refuses(write, plain, other):
    """Nothing is written, and what it raises is eager's."""
    f = WRITES[write]
    compiled = vitrify.compile(f)
    for make in (PLAIN[plain], OTHERS[other], OTHERS[other], PLAIN[plain]):
        same(called(compiled, make()), called(f, make()))
    assert vitrify.counters["kernels_launched"] > 0


@pytest.mark.eager(REFUSED)
def test_a_write_into_one_of_a_split_that_needs_no_gradients():
    f = lambda x, w: x.mul_(w)  # noqa: E731
    compiled = vitrify.compile(f)
    for make in (lambda: torch.ones(2, 3), lambda: torch.ones(4, 3).split(2)[0], lambda: torch.ones(2, 3)):
        same(called(compiled, make()), called(f, make()))


@pytest.mark.eager(REFUSED, some=True)  # of a leaf the capture raises
@pytest.mark.eager("in a way that gradients must follow, and they read it", some=True)
def test_a_tensor_that_the_module_holds_becomes_a_leaf():
    class Holds(torch.nn.Module):
        def forward(self, w):
            return self.held.mul_(w)
    seen = []
    for compiled in (False, True):
        m = Holds()
        m.held = PLAIN["no view"]()
        f = vitrify.compile(m) if compiled else m
        first = called(lambda x, w: f(w), m.held)
        m.held.detach_().requires_grad_()
        seen.append((*first, *called(lambda x, w: f(w), m.held)))
    same(*seen)


@pytest.mark.eager(REFUSED, some=True)
def test_writes_without_gradients_go_on():
    """Under no_grad a leaf may be written, and no view is refused."""
    @torch.no_grad()
    def f(x, w):
        return x.mul_(w)
    compiled = vitrify.compile(f)
    for make in (PLAIN["no view"], OTHERS["a leaf"], OTHERS["one of a split"]):
        a, b, w = make(), make(), torch.full((2, 3), 1.5)
        compiled(a, w), f(b, w)
        assert torch.equal(a, b)
    assert vitrify.counters["eager_calls"] == 0


def forces(x, w):
    with torch.enable_grad():
        energy = (x * w).sin().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


def with_gradients(x, w):
    with torch.enable_grad():
        return (x * w).sin()


def some_of_them(x, w):
    with torch.enable_grad():
        y = (x * w).sin()
    return y * 2, y, x[0], y[0]


def writes(x, w):
    h = x * 1
    with torch.enable_grad():
        h.mul_(w)
    return h


@pytest.mark.parametrize("f", [forces, with_gradients, some_of_them, writes])
@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
def test_enable_grad_in_a_call_without(f):
    compiled = vitrify.compile(f)
    for i in range(3):
        results = []
        for g in (compiled, f):
            torch.manual_seed(i)
            x, w = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True)
            with torch.no_grad():
                out = [t for _, t in compare.tensors_of(g(x, w))]
            heads = [t for t in out if t.requires_grad and t.grad_fn]
            results.append([*[(t.detach(), t.requires_grad, t.is_leaf) for t in out], *torch.autograd.grad([h.sum() for h in heads], [x, w], allow_unused=True)])
        torch.testing.assert_close(*results)
    assert vitrify.counters["kernels_launched"] > 0


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
def test_enable_grad_that_writes_an_input():
    def f(h, w):
        with torch.enable_grad():
            h.mul_(w)
    results = []
    for g in (vitrify.compile(f), f):
        h, w = torch.ones(3), torch.full((3,), 2.0, requires_grad=True)
        with torch.no_grad():
            g(h, w)
        assert h.requires_grad
        results.append(torch.autograd.grad(h.sum(), w)[0])
    torch.testing.assert_close(*results)


ROWS = torch.tensor([2, 0, 1])
SAVED = {
    "index_add": lambda x, w: x.index_add(0, ROWS, w), "index_copy": lambda x, w: x.index_copy(0, ROWS, w), "gather": lambda x, w: w.gather(0, torch.zeros(3, 2, dtype=torch.long)) + x,
    "complex": lambda x, w: torch.complex(x, w), "scatter": lambda x, w: x.scatter(0, torch.tensor([[0, 1], [2, 0], [1, 2]]), w), "sort": lambda x, w: w.sort(0).values + x,
    "where": lambda x, w: torch.where(x > 0.5, x, w), "lerp": lambda x, w: torch.lerp(x, w, 0.3), "cdist": lambda x, w: torch.cdist(x, w),
    "masked_scatter": lambda x, w: x.masked_scatter(x > 0.5, w), "index_put": lambda x, w: x.index_put((ROWS,), w, accumulate=True), "take": lambda x, w: w.take(torch.tensor([0, 1])) + x[0],
    "fmod": lambda x, w: torch.fmod(x, w), "copysign": lambda x, w: torch.copysign(x, w), "a row written": lambda x, w: (lambda y: (y[0].mul_(w[0]), y)[1])(x * 1),
    "cat": lambda x, w: torch.cat([x, w]), "expand_as": lambda x, w: x + w.sum(0).expand_as(x), "unfold": lambda x, w: w.unfold(0, 2, 1).sum() + x,
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", SAVED)
def test_what_eager_saves_is_watched_whether_it_is_read_or_not(name, which):
    def program(x, w):
        return SAVED[name](x, w), x.exp()

    def run(f):
        args = [torch.rand(3, 2, generator=torch.Generator().manual_seed(i)).add_(0.1).requires_grad_() for i in range(2)]
        out, _ = f(*args)
        with torch.no_grad():
            args[which].mul_(2)
        try:
            return torch.autograd.grad(out.abs().sum(), args, allow_unused=True)
        except RuntimeError as e:
            return str(e).partition(":")[0]
    expected, given = run(program), run(vitrify.compile(program, fullgraph=True))
    if isinstance(expected, str):
        assert given == expected
    else:
        torch.testing.assert_close(given, expected)


@pytest.mark.parametrize("name", ["prelu", "mse_loss"])
def test_what_the_gradient_saves_is_watched(name):
    def run(f):
        x, w = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).requires_grad_(), torch.rand(4, generator=torch.Generator().manual_seed(2)).requires_grad_()
        grads = torch.autograd.grad(f(x, w).sum(), (x, w), create_graph=True)
        with torch.no_grad():
            w.mul_(2)
        try:
            return torch.autograd.grad(sum(g.square().sum() for g in grads), x)
        except RuntimeError as e:
            return str(e).partition(":")[0]
    f = {"prelu": torch.nn.functional.prelu, "mse_loss": lambda x, w: torch.nn.functional.mse_loss(x, w.expand(3, 4), reduction="none")}[name]
    expected, given = run(f), run(vitrify.compile(f, fullgraph=True))
    if isinstance(expected, str):
        assert given == expected
    else:
        torch.testing.assert_close(given, expected)


RESULTS = {"product": lambda x: x * x, "two": lambda x: ((x * x).sin(), x.exp())[0], "saves nothing": lambda x: x * 2 + 1, "view": lambda x: (x * x).view(2, 2)}


@pytest.mark.parametrize("then", ["again", "whole", "written", "kept"])
@pytest.mark.parametrize("fn", RESULTS)
def test_the_node_of_a_result_runs(fn, then):
    """backward(inputs=[y]) runs the node of y, for nothing: it raises what that raises, and is freed. Ours came to none."""
    def program(f):
        x = torch.linspace(1, 2, 4, dtype=torch.float64, requires_grad=True)
        h = x * 1
        y = f(h)
        if then == "written":
            with torch.no_grad():
                h.mul_(2)
        got = []
        try:
            torch.autograd.backward(y.sum(), inputs=[y], retain_graph=then == "kept")
            got.append(y.grad)
            if then == "again":
                torch.autograd.backward(y.sum(), inputs=[y])
            got += torch.autograd.grad(y.sum(), x)
        except RuntimeError as e:
            got.append(str(e).partition(", which is output")[0].partition(" is at version")[0].partition("\n")[0])
        return got
    got, expected = program(vitrify.compile(RESULTS[fn], fullgraph=True)), program(RESULTS[fn])
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        if isinstance(b, str):
            assert a == b
        else:
            torch.testing.assert_close(a, b)
