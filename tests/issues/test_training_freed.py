"""What a backward frees is what eager's frees: the tensors of the nodes it went through. Those of other results of the same call are still there, and what saves
nothing may run again."""
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
import gradients  # noqa: E402
from gradients import check, leaf, leaves  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")


class Held(torch.autograd.Function):
    """It holds on to a tensor by itself: nothing frees that."""

    @staticmethod
    def forward(ctx, x):
        ctx.mask = x > 0.9
        return x * ctx.mask

    @staticmethod
    def backward(ctx, g):
        return g * ctx.mask


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


def written(x):
    y = x.clone()
    y[0] = 1.
    return y


ONE = {
    "mul by a number": lambda x: x * 2, "add": lambda x: x + 1, "div by a number": lambda x: x / 2, "sum": lambda x: x.sum(), "view": lambda x: x.view(-1)[2:] + 0,
    "written": written, "holds": Held.apply, "keeps": Kept.apply, "exp": torch.exp, "gather": lambda x: x.gather(1, torch.zeros(3, 1, dtype=torch.long)),
    "cumsum": lambda x: x.neg().cumsum(0), "matmul by a constant": lambda x: x @ torch.ones(3, 3), "pow 0": lambda x: x.pow(0), "abs": torch.abs,
    "masked_fill": lambda x: x.masked_fill(x > .5, 0.), "round": torch.round, "mean": lambda x: x.mean(), "max": lambda x: x.max(), "mul by a tensor": lambda x: x * torch.tensor(2.),
    "rsub": lambda x: 1 - x, "neg": torch.neg, "clamp": lambda x: x.clamp(0, 1), "index": lambda x: x[[0, 1]], "where": lambda x: torch.where(x > .9, x, 0.),
    "log_softmax": lambda x: x.log_softmax(0), "cat": lambda x: torch.cat([x, x]), "lerp": lambda x: torch.lerp(x, x, 0.3), "to": lambda x: x.double(),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros(3, 3)), "relu": torch.relu, "layer_norm": lambda x: F.layer_norm(x, (3,)), "floor": lambda x: x.div(3, rounding_mode="floor"),
    "fmod": lambda x: x % 2, "addcmul": lambda x: torch.addcmul(x, torch.ones(3, 3), torch.ones(3, 3)), "avg_pool2d": lambda x: F.avg_pool2d(x[None], 2),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2), "repeat": lambda x: x.repeat(2, 1) + x.expand(2, 3, 3)[0].flip(0).repeat(2, 1), "linear": lambda x: F.linear(x, torch.ones(2, 3)),
    "detached factor": lambda x: x * x.detach(), "two, one of which saves": lambda x: x.sum() + x.exp().sum(),
}


def twice(out, args):
    for _ in range(2):
        torch.autograd.backward(out, gradients.weights([out])[0])


@pytest.mark.parametrize("name", ONE)
def test_a_second_backward(name):
    norm = name == "layer_norm"  # one call of ATen, which magnifies roundings
    check(ONE[name], leaves((3, 3), dtype=torch.float64 if norm else torch.float32), then=twice, native="none" if norm else "forward")


def results_of(a, b, w):
    h = a + b  # both go through it
    return (h * w).sin().sum(), (h.exp() * b).sum(), (a - b).sum()


def backwards(*which, **more):
    """One backward after another; the index of a result, or several at once, or a kind of its own."""
    def run(out, args):
        for w in which:
            if isinstance(w, int):
                out[w].backward(**more)
            elif isinstance(w, tuple):
                torch.autograd.backward([out[i] for i in w], **more)
            else:
                w(out, args)
    return run


def grad_of(result, *inputs, **more):
    return lambda out, args: torch.autograd.grad(out[result], [args[i] for i in inputs], **more)


ORDERS = {
    "0 1": (0, 1), "1 0": (1, 0), "2 2": (2, 2), "0 2 1": (0, 2, 1), "0 0": (0, 0), "1 2 1": (1, 2, 1), "2 (0 1)": (2, (0, 1)), "(0 1) 0": ((0, 1), 0), "(0 1) 2": ((0, 1), 2), "(0 2) 1": ((0, 2), 1),
    "kept, 0 0": (lambda out, args: out[0].backward(retain_graph=True), 0, 0), "kept, 0 1 0": (lambda out, args: out[0].backward(retain_graph=True), 0, 1, 0),
    "a of 0, then 0": (grad_of(0, 0), 0), "w of 0, then 1": (grad_of(0, 2), 1), "w of 0, then a of 0": (grad_of(0, 2), grad_of(0, 0)), "b of 2, a of 2": (grad_of(2, 1), grad_of(2, 0), 2),
    "b of 1, then a of 1": (grad_of(1, 1), grad_of(1, 0)), "with history, then 0": (grad_of(0, 0, create_graph=True), 0, 0), "with history, freed": (grad_of(0, 0, create_graph=True, retain_graph=False), 0),
    "with history, freed, the other": (grad_of(0, 0, create_graph=True, retain_graph=False), 1, 1),
}


@pytest.mark.parametrize("name", ORDERS)
def test_several_results(name):
    check(results_of, leaves((3, 3), (3, 3), (3, 3)), then=backwards(*ORDERS[name]), native="forward")


# What is drawn has gradients of zero, which follow from no tangent.
DRAWN = {
    "read by others": lambda a, b: (v := torch.poisson(b.abs()), torch.normal(v, .5), a * v), "of a chain": lambda a, b: (v := torch.poisson(b.exp().sin().abs()), torch.normal(v, .5), a * v),
    "added to others": lambda a, b: (e := b.exp(), v := torch.poisson(e.abs()), torch.normal(v, .5), a * v * e.cos())[1:], "each alone": lambda a, b: (torch.normal(b.exp(), 1.), torch.normal(b.sin().exp(), 1.), a * b),
}


@pytest.mark.parametrize("which", [((0, 1, 2),), (2, 1, 0), (0, 1, 2), ((1, 2), 0), (2, 2)], ids=str)
@pytest.mark.parametrize("name", DRAWN)
def test_gradients_that_are_zeros(name, which):
    """What they are made of went with what other results had kept."""
    check(DRAWN[name], leaves((3,), (3,)), then=lambda out, args: backwards(*which)([t.sum() for t in out], args), native="forward")


# A result that one part saves and another computes again, of what the program made it of.
AGAIN = {
    "a product": lambda v, w: (v.sin() @ w, v.mT @ v, v), "norms": lambda v, w: (F.rms_norm(v, (4,)) @ w, v.mT @ v, v), "a view": lambda v, w: (v.exp() @ w, v.view(-1), v, v.mT @ v),
    "layer norm": lambda v, w: (F.layer_norm(v, (4,)) @ w, v.mT @ v.sin(), v),
}


@pytest.mark.parametrize("which", [((0, 1, 2),), (0, 1, 2), (1, 0, 2), (2, 1, 0), ((1, 2), 0), (1, 1), (0, (0, 1))], ids=str)
@pytest.mark.parametrize("name", AGAIN)
def test_what_one_part_has_freed_and_another_computes_again(name, which):
    """The derivative of one part read the copy that the derivative through all results needs for the other only."""
    check(lambda x, w: AGAIN[name](x.clone().tril(), w), leaves((5, 4), (4, 4), dtype=torch.float64), then=lambda out, args: backwards(*which)([t.sin().sum() for t in out], args), native="forward")


def test_two_losses_over_different_parameters():
    a, b = nn.Linear(4, 3), nn.Linear(4, 3)

    def losses(x):
        return F.mse_loss(a(x).tanh(), x[:, :3]), F.mse_loss(b(x).sigmoid(), x[:, 1:])
    grads = []
    for f in (losses, vitrify.compile(losses, fullgraph=True)):
        for m in (a, b):
            m.zero_grad()
        for step in range(3):
            first, second = f(torch.randn(5, 4, generator=torch.Generator().manual_seed(step)))
            first.backward()
            second.backward()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                first.backward()
        grads.append([p.grad.clone() for m in (a, b) for p in m.parameters()])
    torch.testing.assert_close(*grads)
    assert vitrify.counters["eager_calls"] == vitrify.counters["fallbacks"] == 0 and vitrify.counters["kernels_launched"] > 0


def test_an_adversary_and_its_opponent():
    """The generator's loss goes through the discriminator, whose own does not go through the generator."""
    make = lambda: (nn.Linear(3, 4), nn.Linear(4, 1))  # noqa: E731
    results = []
    for compiled in (False, True):
        torch.manual_seed(2)
        g, d = make()

        def both(z, real):
            fake = g(z).tanh()
            return F.softplus(-d(fake)).mean(), (F.softplus(d(fake.detach())) + F.softplus(-d(real))).mean()
        f = vitrify.compile(both, fullgraph=True) if compiled else both
        for step in range(3):
            loss_g, loss_d = f(torch.randn(6, 3, generator=torch.Generator().manual_seed(step)), torch.ones(6, 4))
            loss_g.backward()
            loss_d.backward()
        results.append([p.grad.clone() for m in (g, d) for p in m.parameters()])
    torch.testing.assert_close(*results)
    assert vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0


def second_order(*then):
    """g: the gradient of result 0 by a, with history. Letters: backward through g, or through a result."""
    def run(out, args):
        g, = torch.autograd.grad(out[0], args[0], create_graph=True)
        for what in then:
            if what == "g":
                g.sum().backward()
            elif what == "kept g":
                g.sum().backward(retain_graph=True)
            elif what == "w of g":
                torch.autograd.grad(g.sum(), args[2])
            else:
                out[what].backward()
    return run


@pytest.mark.parametrize("then", [("g", 0), (0, "g"), ("kept g", 0), ("kept g", "g"), ("g", "g"), ("g", 1), (1, "g"), ("g", 2, 2), (2, "g"), ("w of g", 0), ("w of g", "g"), (0, 2, "g")], ids=str)
def test_second_order(then):
    """Gradients of gradients go through the nodes of the program too."""
    check(results_of, leaves((3, 3), (3, 3), (3, 3)), then=second_order(*then), native="forward")


def test_what_one_loss_kept_goes_with_it():
    """Memory, without the garbage collector: of the first loss, before anything goes back through the second."""
    def fn(x, y):
        return (x * x.exp()).sum(), (y * y.exp()).sum()
    for f in (fn, vitrify.compile(fn, fullgraph=True)):
        with gradients.collector_off():
            x, y = (torch.rand(64, requires_grad=True) for _ in range(2))
            a, b = x * 1, y * 1
            first, second = f(a, b)
            kept = [StorageWeakRef(t.untyped_storage()) for t in (a, b)]
            del a, b
            assert [k.expired() for k in kept] == [False, False]
            first.backward()
            assert [k.expired() for k in kept] == [True, False]
            second.backward()
            assert [k.expired() for k in kept] == [True, True]
            torch.testing.assert_close(y.grad, ((1 + y) * y.exp()).detach())


@pytest.mark.parametrize("hooks", [False, True])
def test_with_hooks_of_saved_tensors(hooks):
    for f in (results_of, vitrify.compile(results_of, fullgraph=True)):
        given = leaves((3, 3), (3, 3), (3, 3))()
        with torch.autograd.graph.saved_tensors_hooks(vitrify.mark_lossless(lambda t: t), lambda t: t) if hooks else torch.enable_grad():
            out = f(*given)
        out[0].backward()
        out[1].backward()
        out[2].backward()
        out[2].backward()
        for i in (0, 1):
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                out[i].backward()


@pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("create_graph", [False, True], ids=["once", "twice"])
def test_what_was_freed_and_is_not_asked_for(create_graph, dynamic, hooks):
    """The plan computes what nobody asked for too, which reads what is gone."""
    def told(f):
        w, v = torch.full((3,), 0.5, requires_grad=True), torch.ones(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(vitrify.mark_lossless(lambda t: t.clone()), lambda t: t) if hooks else torch.enable_grad():
            y = f(w, v)
        torch.autograd.grad(y, [w, v], torch.ones(3))
        seen = [torch.autograd.grad(y, v, torch.ones(3), create_graph=create_graph, retain_graph=False)[0].detach()]
        y.backward(torch.ones(3), inputs=[v])
        seen.append(v.grad)
        for asked in ([w], [w, v]):
            with pytest.raises(RuntimeError, match="a second time"):
                torch.autograd.grad(y, asked, torch.ones(3), create_graph=create_graph)
        return seen

    def fn(w, v):
        return w.exp().sin() + v.neg()
    torch.testing.assert_close(told(vitrify.compile(fn, fullgraph=True, dynamic=dynamic)), told(fn))


@pytest.mark.parametrize("twice", [False, True])
def test_sizes_of_what_was_freed(twice):
    def fn(x, w):
        return torch.cat([x, x]), w.exp()
    compiled = vitrify.compile(fn, dynamic=True, fullgraph=True)
    for n in (2, 4):
        seen = []
        for f in (compiled, fn):
            x, w = torch.ones(n, 3, requires_grad=True), torch.ones(n, 3, requires_grad=True)
            a, b = f(x, w)
            b.sum().backward()
            seen.append(torch.autograd.grad(a.sum(), x, create_graph=twice)[0].detach())
        torch.testing.assert_close(*seen)


UNREAD = {
    "floor": lambda x, t: torch.div(x, t, rounding_mode="floor"),
    "addcdiv": lambda x, t: torch.addcdiv(x, t, t),
    "norm": lambda x, t: (x * 1).norm(0) + 0 * t.neg().sum(),
    "sgn": lambda x, t: x.sgn() + t.neg(),
    "cummax": lambda x, t: x.cummax(0)[0] + t.neg(),
    "cummin": lambda x, t: x.cummin(0)[0] + t.neg(),
    "pow": lambda x, t: x ** t,
    "mul": lambda x, t: x * t + x,
}


@pytest.mark.parametrize("name", UNREAD)
@pytest.mark.parametrize("written", ["x", "t", "result", "nothing"])
def test_what_is_saved_and_not_read(name, written):
    """Eager asks for it all the same: it may neither be written nor gone."""
    def told(f):
        x, t = torch.tensor([1.0, 3.0, 2.0], requires_grad=True), torch.tensor([2.0, 1.0, 3.0])
        h = x.neg()
        y = f(h.neg(), t) if written == "result" else f(h, t)
        with torch.no_grad():
            if written != "nothing":
                {"x": h, "t": t, "result": y}[written].add_(1)
        seen = []
        for _ in range(2):
            try:
                seen.append(torch.autograd.grad(y, h if written != "result" else x, torch.ones_like(y))[0].clone())
            except RuntimeError as e:
                seen.append(str(e).partition(":")[0][:60])
        return seen
    ours, eager = told(vitrify.compile(UNREAD[name], fullgraph=True)), told(UNREAD[name])
    for a, b in zip(ours, eager):
        assert a == b if isinstance(a, str) or isinstance(b, str) else torch.equal(a, b)


WRITTEN = {
    "exp_": lambda h: (h.exp_(), h + 1)[1], "relu_": lambda h: (h.relu_(), h * 2)[1], "tanh_": lambda h: (h.tanh_(), h + 1)[1], "sigmoid_": lambda h: (h.sigmoid_(), h.sin())[1],
    "a row": lambda h: (h[0].exp_(), h.cos())[1], "mul_": lambda h: (h.mul_(h.detach().clone()), h.sin())[1],
}


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", WRITTEN)
def test_gradients_of_gradients_beside_the_gradient_of_a_written_argument(name, order, retain):
    """One backward comes to what the gradient is made of and to the nodes of the program: the one freed what the other, in the same backward, had still to read."""
    def run(f):
        x = torch.tensor([0.5, -1.0], requires_grad=True)
        h = x * 1
        y = f(h)
        g, = torch.autograd.grad((y * h).sum(), x, create_graph=True)
        for _ in range(order - 2):
            g, = torch.autograd.grad((g * y).sum(), x, create_graph=True)
        result = torch.autograd.grad((g * y).sum() + h.sum(), x, retain_graph=retain)
        try:
            return [*result, *torch.autograd.grad(y.sum(), x)]
        except RuntimeError as e:
            return [*result, str(e).partition(".")[0]]
    expected, given = run(WRITTEN[name]), run(vitrify.compile(WRITTEN[name], fullgraph=True))
    assert isinstance(expected[1], str) == isinstance(given[1], str) and (not isinstance(expected[1], str) or given[1] == expected[1]), (given, expected)
    for a, b in zip(given, expected):
        if not isinstance(b, str):
            torch.testing.assert_close(a, b)


@pytest.mark.no_kernels("a library makes the number, and gradients are its parts", some=True)
def test_parts_of_a_complex_number():
    """Its node has saved tensors of which its formula reads nothing."""
    def run(f):
        x, w = leaf(2), leaf(2, seed=2)
        a, b = f(x, w)
        a.sum().backward()
        try:
            b.sum().backward()
        except RuntimeError as e:
            return str(e).partition(".")[0]
    parts = lambda x, w: (lambda z: (z.real, z.imag))(torch.complex(x, w))  # noqa: E731
    assert "second time" in run(parts)
    assert run(vitrify.compile(parts, fullgraph=True)) == run(parts)


@pytest.mark.no_kernels("nothing has elements")
def test_a_formula_that_gives_what_it_has_saved():
    """Of no elements cummax's gives its operand itself: that follows from no result, and the first part of a backward freed it for the next."""
    def f(x):
        y = torch.cummax(x.clone(), -2).values
        return y.unfold(-2, 2, 1), y.sin()

    def run(f):
        x = torch.rand(0, 4, 3).requires_grad_()
        a, b = f(x)
        (a.sum() + b.sum()).backward(retain_graph=True)
        (a.sum() + b.sum()).backward()
        with pytest.raises(RuntimeError, match="second time"):
            a.sum().backward()
        return x.grad.shape
    assert run(vitrify.compile(f, fullgraph=True)) == run(f)
