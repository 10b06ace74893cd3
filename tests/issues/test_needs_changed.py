"""What eager has saved needs a gradient, or needs none, as it does by the time of a backward that is differentiated again."""
import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify

W = torch.linspace(0.5, 1.5, 9, dtype=torch.float64).view(3, 3)
FNS = {
    "product": lambda x, w: (x * w).exp(), "matrix product": lambda x, w: (x @ w).tanh(), "linear": lambda x, w: F.linear(x, w).tanh(),
    "two results": lambda x, w: ((x @ w).tanh(), x * 2)[0], "captured": lambda x, w: (x * W).sin() * w, "written result": lambda x, w: (x * w).mul_(x),
}


def leaf(first, needs=True):
    return torch.linspace(first, first + 1, 9, dtype=torch.float64).view(3, 3).requires_grad_(needs)


def outcome(f, before, after, by, order=2):
    """`before`, `after`: which of x, w and W need gradients in the forward and in the backward; gradients by `by`."""
    W.grad = None
    all = {"x": leaf(0.1, "x" in before), "w": leaf(0.7, "w" in before), "W": W.requires_grad_("W" in before)}
    results = []
    for _ in range(2):
        for name, t in all.items():
            t.requires_grad_(name in before)
        y = f(all["x"], all["w"])
        for name, t in all.items():
            t.requires_grad_(name in after)
        g = y.sum()
        for _ in range(order - 1):
            g, = torch.autograd.grad(g.sum(), all[by], create_graph=True, allow_unused=True)
            results.append(None if g is None else (g.detach(), g.requires_grad))
            if g is None or not g.requires_grad:
                return results
        g.square().sum().backward()
        results += [None if t.grad is None else t.grad.clone() for t in all.values()]
    W.requires_grad_(False)
    return results


def same(a, b):
    assert len(a) == len(b)
    for t, u in zip(a, b, strict=True):
        assert (t is None) == (u is None)
        if isinstance(t, tuple):
            assert t[1] == u[1]
            t, u = t[0], u[0]
        if t is not None:
            torch.testing.assert_close(t, u)


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("before, after", [("x", "xw"), ("w", "xw"), ("xw", "x"), ("xw", "w"), ("xw", "xwW"), ("xwW", "xw"), ("x", "xwW"), ("xW", "xw")])
@pytest.mark.parametrize("fn", FNS)
def test_leaves(fn, before, after, order):
    """They were taken as they were in the forward: no gradient came back to what had begun to need one."""
    for by in set(before) & set(after) - {"W"}:
        same(outcome(vitrify.compile(FNS[fn], fullgraph=True), before, after, by, order), outcome(FNS[fn], before, after, by, order))


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
def test_derivatives_are_kept():
    """Loops that freeze a network in each step take the derivative once."""
    f = vitrify.compile(lambda x, w: (x * w).exp(), fullgraph=True)
    for step in range(4):
        outcome(f, "xw", "x", "x")
        if step == 0:
            before = vitrify.counters["values_compiled"]
    assert vitrify.counters["values_compiled"] == before


FROZEN = {"frozen": (False, False), "without": (True, False), "with": (True, True)}  # needs gradients, has one


@pytest.mark.eager("it writes Python state, as caches do at first", some=True)
@pytest.mark.parametrize("then", FROZEN)
@pytest.mark.parametrize("first", FROZEN)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_compiled_step_of_what_is_frozen_and_thawed(optimizer, first, then):
    """A parameter that was frozen at the capture was never updated again."""
    def outcome(make):
        p, q = leaf(1), leaf(2)
        step = make(optimizer([p, q], lr=0.1).step)
        for case in (first, then, first):
            needs, has = FROZEN[case]
            p.requires_grad_(needs)
            p.grad = torch.ones_like(p) if has else None
            q.grad = torch.ones_like(q)
            step()
        return p.detach(), q.detach()
    for a, b in zip(outcome(vitrify.compile), outcome(lambda f: f), strict=True):
        torch.testing.assert_close(a, b)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, t):
        ctx.save_for_backward(x, t)
        return x * x * t

    @staticmethod
    def backward(ctx, g):
        x, t = ctx.saved_tensors
        return g * 2 * x * t, None


MADE = {"computed": lambda x, c: c * 2, "detached": lambda x, c: x.detach() * 2, "drawn": lambda x, c: torch.rand_like(c) + c, "a view of an argument": lambda x, c: c[:], "a view": lambda x, c: (c * 2).t()}
READS = {"an op": lambda x, t: x * x * t, "a Function": Product.apply}


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("made", MADE)
def test_a_result_that_begins_to_need_gradients(made, reads, order):
    """It had none, and its .grad lacked a summand."""
    expects.eager("a tensor that the program has written or made begins to need gradients", some=True)

    def program(x, c):
        t = MADE[made](x, c)
        return READS[reads](x, t), t

    def told(f):
        torch.manual_seed(1)
        x, c = leaf(0.1), leaf(0.7, False)
        y, t = f(x, c)
        t.requires_grad_()
        g = y.sum()
        for _ in range(order - 1):
            g, = torch.autograd.grad(g.sum(), x, create_graph=True)
        dt = torch.autograd.grad(g.sum(), t, retain_graph=True, allow_unused=True)[0]
        (g.sum() + (t * t).sum()).backward()
        return dt, t.grad, x.grad
    f = vitrify.compile(program)
    with pytest.raises(RuntimeError, match="a tensor that the program has written or made begins to need gradients"):
        told(f)
    for _ in range(2):
        for a, b in zip(told(f), told(program), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
@pytest.mark.parametrize("made", ["beside", "detached of what is read"])
@pytest.mark.parametrize("toggled", [True, False])
def test_a_result_that_nothing_reads_begins_to_need_gradients(toggled, made):
    def told(f):
        x, c = leaf(0.1), leaf(0.7, False)
        y, t, read = f(x, c)
        t.requires_grad_()
        if toggled:
            read.requires_grad_()
            read.requires_grad_(False)
        g, = torch.autograd.grad(y.sum(), x, create_graph=True)
        (g.sum() + (t * t).sum()).backward()
        return t.grad, x.grad

    def program(x, c):
        read = c + 1
        return x * x * read, c * 2 if made == "beside" else read.detach(), read
    f = vitrify.compile(program, fullgraph=True)
    for _ in range(3):
        for a, b in zip(told(f), told(program), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
@pytest.mark.parametrize("order", [3, 4])
@pytest.mark.parametrize("before, after", [(False, True), (True, False), (True, True)])
def test_an_incoming_gradient_that_begins_to_need_gradients(before, after, order):
    """A derivative of third order raised."""
    def told(f):
        results = []
        for _ in range(2):
            x, v = leaf(0.1), leaf(0.7, before)
            g, = torch.autograd.grad(f(x), x, v, create_graph=True)
            v.requires_grad_(after)
            for _ in range(order - 2):
                g, = torch.autograd.grad(g.sum(), x, create_graph=True)
            results += torch.autograd.grad(g.sum(), [x, v] if after else [x], allow_unused=True)
        return results
    f = vitrify.compile(lambda x: x.sin().exp(), fullgraph=True)
    for a, b in zip(told(f), told(lambda x: x.sin().exp()), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
def test_an_incoming_gradient_that_begins_to_need_gradients_after_one_that_did():
    """Its gradient was None: the derivative asked for that of the other one."""
    def told(f):
        results = []
        for needs in (True, False, True, False):
            x, v = leaf(0.1), leaf(0.7, needs)
            g, = torch.autograd.grad(f(x), x, v, create_graph=True)
            v.requires_grad_()
            h, = torch.autograd.grad(g.sum(), x, create_graph=True)
            h.pow(2).sum().backward()
            results += [x.grad, v.grad]
        return results
    for a, b in zip(told(vitrify.compile(lambda x: x * x * x, fullgraph=True)), told(lambda x: x * x * x), strict=True):
        torch.testing.assert_close(a, b)
