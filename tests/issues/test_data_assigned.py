"""Tensors whose .data is another tensor by the time of the backward: where eager has saved them it reads what is there by then, and raises where it is of another
size; where it has saved a view of them, or what was made of them, it reads what was there."""
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint


def leaf(seed):
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_(True)


FNS = {"mm": lambda x, w: x @ w, "mul": lambda x, w: x * w}
DATA = {
    "other": lambda: leaf(2).detach(),
    "transposed": lambda: leaf(2).detach().t(),
    "expanded": lambda: leaf(2).detach()[:1].expand(16, 16),
    "windowed": lambda: torch.cat([leaf(2).detach()] * 2, 1)[:, 3:19],
    "smaller": lambda: leaf(2).detach()[:2, :2],
    "larger": lambda: torch.cat([leaf(2).detach()] * 2),
    "empty": lambda: torch.empty(0),
    "double": lambda: leaf(2).detach().double(),
}


@pytest.mark.eager("what they read has another size or dtype than in the forward", some=True)
@pytest.mark.parametrize("fn, data, twice", [(f, d, t) for f in FNS for d in DATA for t in (False, True) if (d, t) != ("double", True)])
def test_another_tensor(fn, data, twice):
    """The plan read the new memory as if it were of the old sizes, strides and type."""
    results = []
    compiled = vitrify.compile(FNS[fn], fullgraph=True)
    for f in (compiled, FNS[fn]):
        for _ in range(2):
            x, w = leaf(0), leaf(1)
            out = f(x, w)
            w.data = DATA[data]()
            try:
                if twice:
                    first, = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
                    results.append([first.detach()])
                else:
                    out.sum().backward()
                    results.append([x.grad])
            except RuntimeError:
                results.append(None)
    for ours, eager in zip(results[:2], results[2:]):
        assert (ours is None) == (eager is None)
        for a, b in zip(ours or (), eager or ()):
            torch.testing.assert_close(a, b)


@pytest.mark.eager("what they read has another size or dtype than in the forward")
def test_another_dtype_and_gradients_of_gradients():
    """Eager's formula computes in both dtypes, and has a derivative: ours says so, and leaves the next call to eager."""
    def first(f):
        x, w = leaf(0), leaf(1)
        out = f(x, w)
        w.data = DATA["double"]()
        return torch.autograd.grad(out.sin().sum(), x, create_graph=True)[0].detach()
    compiled = vitrify.compile(FNS["mul"], fullgraph=True)
    with pytest.raises(RuntimeError, match="cannot be compiled: what they read has another size or dtype than in the forward; calls from now on run eagerly"):
        first(compiled)
    assert torch.equal(first(compiled), first(FNS["mul"]))


def other(t):
    return torch.full_like(t, 0.5)


def leafs(*shapes):
    return [torch.randn(s, generator=torch.Generator().manual_seed(i)).requires_grad_(True) for i, s in enumerate(shapes)]


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * x.detach()


PROGRAMS = {
    "product": (lambda x, w: (x * w).sin(), ((4, 8), (4, 8))),
    "itself": (lambda x, w: (x * x).sin() * w, ((4, 8), (4, 8))),
    "matrices": (lambda x, w: x @ w, ((4, 8), (8, 5))),
    "linear": (F.linear, ((4, 8), (5, 8))),
    "rows of rows": (F.linear, ((2, 4, 8), (5, 8))),
    "both": (lambda x, w: F.linear(x, w).sum() + (w * w).sum() + (x.view(-1) * x.view(-1)).sum(), ((4, 8), (5, 8))),
    "both and again": (lambda x, w: F.linear(F.gelu(x) * x, w).tanh().sum() + (w * w).sin().sum(), ((4, 8), (5, 8))),
    "views": (lambda x, w: x.view(8, 4).t() @ w, ((4, 8), (8, 5))),
    "detached": (lambda x, w: x.detach() * x * w, ((4, 8), (4, 8))),
    "detached only": (lambda x, w: x.detach() * w, ((4, 8), (4, 8))),
    "norm": (lambda x, w: F.layer_norm(x, (8,), w[0], w[1]), ((4, 8), (2, 8))),
    "convolution": (lambda x, w: F.conv1d(x, w).sin(), ((2, 3, 9), (4, 3, 3))),
    "a user's own": (lambda x, w: Keeps.apply(x) * w, ((4, 8), (4, 8))),
    "made again": (lambda x, w: (x + 1).relu() * (w.exp() + x), ((64, 64), (64, 64))),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("budget", [1.0, 0.0], ids=["", "budget"])
@pytest.mark.parametrize("kind", ["leaf", "made", "constant"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_eager_has_saved(program, kind, budget):
    """Leaves that eager had saved a view of (each weight of linear) were read as they are by then; what is no leaf was read as it was, whatever was saved."""
    fn, shapes = PROGRAMS[program]
    results = []
    for f in (vitrify.compile(fn, fullgraph=True, options={"memory_budget": budget}), fn):
        for which in (0, 1, 2):
            leaves = leafs(*shapes)
            args = [t if kind == "leaf" or (kind == "constant" and i != which) else t.detach() if kind == "constant" else t * 1.5 for i, t in enumerate(leaves)]
            out = f(*args)
            for i, t in enumerate(args):
                if which in (i, 2):
                    t.data = other(t)
            if not out.requires_grad:
                continue
            out.sum().backward()
            results.append([t.grad for t in leaves])
    half = len(results) // 2
    torch.testing.assert_close(results[:half], results[half:])


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("program", ["product", "itself", "linear", "detached", "a user's own"])
def test_gradients_of_gradients(program, when):
    fn, shapes = PROGRAMS[program]
    results = []
    for f in (vitrify.compile(fn, fullgraph=True), fn):
        leaves = leafs(*shapes)
        args = [t * 1.5 for t in leaves]
        out = f(*args)
        if when == "before":
            args[0].data = other(args[0])
        first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
        if when == "between":
            args[0].data = other(args[0])
        sum(g.square().sum() for g in first).backward()
        results.append([*(g.detach() for g in first), *(t.grad for t in leaves)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_weights_of_a_network(budget):
    results = []
    for compiled in (True, False):
        torch.manual_seed(0)
        m = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 3))
        x = torch.randn(4, 8, requires_grad=True)
        out = (vitrify.compile(m, options={"memory_budget": budget}) if compiled else m)(x)
        for p in m.parameters():
            p.data = other(p)
        out.sum().backward()
        results.append([x.grad, *(p.grad for p in m.parameters())])
    torch.testing.assert_close(*results)


def two(x):
    a = x.exp()
    return a, a * a


RESULTS = {
    "saved twice": two,
    "saved by itself": lambda x: (lambda a: (a, a.sin()))(x * 2),
    "saved by what made it": lambda x: (lambda a: (a, a * 2))(x.exp()),
    "a view of it": lambda x: (lambda a: (a, a.view(-1).sin()))(x.exp()),
    "all of them": lambda x: (lambda a: (a, (a.view(-1) * a.view(-1)).sum() + (a * a).sum() + (a @ a.t()).sum()))(x.exp()),
    "made again": lambda x: (lambda a: (a, (a + 1).relu() * (a.exp() + x)))(x.sigmoid()),
    "no gradient": lambda x: (lambda a: (a, a * x))(x.detach().exp()),
    "written": lambda x: (lambda a: (a.mul_(2), a.sin()))(x * 3),
    "written in part": lambda x: (lambda a: (a[1:].relu_(), a, a.sin())[1:])(x * 3),
    "written, and saved by what wrote": lambda x: (lambda a: (a.relu_(), a.relu()))(x * 3),
    "written, and a view of it": lambda x: (lambda a: (a.mul_(2), a.view(-1).sin()))(x * 3),
}


@pytest.mark.parametrize("twice", [False, True], ids=["", "gradients of gradients"])
@pytest.mark.parametrize("budget", [1.0, 0.0], ids=["", "budget"])
@pytest.mark.parametrize("fn", RESULTS)
def test_results_that_others_have_saved(fn, budget, twice):
    """What they were was read. Where a node has saved its own result, that is what it was."""
    results = []
    for f in (vitrify.compile(RESULTS[fn], fullgraph=True, options={"memory_budget": budget}), RESULTS[fn]):
        x, = leafs((4, 8))
        a, b = f(x)
        a.data = other(a)
        first, = torch.autograd.grad(b.sum(), x, create_graph=twice)
        results.append([first.detach(), *(torch.autograd.grad(first.square().sum(), x) if first.requires_grad else [])])
    torch.testing.assert_close(*results)


VIEWS = {
    "one": lambda x: (lambda y: (y, y.square()))((x * 2)[1:]),
    "not dense": lambda x: (lambda y: (y, y.square()))((x * 2)[:, 1:]),
    "of another result": lambda x: (lambda a: (lambda y: (y, a, y.square().sum() + a.sin().sum()))(a[1:]))(x * 2),
    "two of one": lambda x: (lambda a: (lambda y, z: (y, z, (y * z).sin()))(a[1:], a[:-1]))(x * 2),
    "of one call": lambda x: (lambda y, z: (y, z, (y * z).sin()))(*(x * 2).chunk(2)),
    "a view of a view": lambda x: (lambda y: (lambda z: (y, z, (y.sum() * z).sin() + y.exp().sum()))(y.t()))((x * 2)[1:]),
    "saved as another view of it": lambda x: (lambda y: (y, y.t().sin() + y.t().cos()))((x * 2)[1:]),
    "of what it was given": lambda x: (lambda y: (y, y.square()))(x[1:]),
    "of what it was given and read": lambda x: (lambda y: (y, y.square().sum() + x.square().sum()))(x.view(-1)),
    "detached": lambda x: (lambda y: (y, y * x))((x * 2).detach()),
    "no gradient": lambda x: (lambda y: (y, y * x[1:]))((x.detach() * 2)[1:]),
    "matrices": lambda x: (lambda y: (y, y @ y.t()))((x * 2)[1:]),
    "written": lambda x: (lambda y: (y.mul_(3), y.square()))((x * 2)[1:]),
    "saved by what wrote": lambda x: (lambda y: (y.exp_(), y * 2))((x * 2)[1:]),
    "written, and its base": lambda x: (lambda a: (lambda y: (y, a.mul_(2), y.sin()))(a[1:]))(x * 3),
    "squeezed in place": lambda x: (lambda y: (y.unsqueeze_(0), y.square()))((x * 2)[1:]),
    "a user's own": lambda x: (lambda y: (y, Keeps.apply(y)))((x * 2)[1:]),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("times", ["once", "before", "between", "both"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
@pytest.mark.parametrize("fn", VIEWS)
@pytest.mark.eager("op by op: what they read is changed", some=True)
def test_results_that_are_views(fn, dynamic, times):
    """What is a view of memory that another result is, or that nobody has, was read as it was. `times`: before which of the gradients it is assigned to."""
    results = []
    for f in (vitrify.compile(VIEWS[fn], fullgraph=True, dynamic=dynamic), VIEWS[fn]):
        for which in (0, 1, 0):
            x = leafs((4, 8))[0].detach().double().requires_grad_(True)
            *views, b = f(x)
            def assign():
                for y in views[which:which + 1]:
                    y.data = torch.stack([y.detach() * 3] * 2, -1)[..., 0]
            if times != "between":
                assign()
            first, = torch.autograd.grad(b.sum(), x, create_graph=times != "once")
            if times in ("between", "both"):
                assign()
            results.append([first.detach(), *(torch.autograd.grad(first.square().sum(), x) if first.requires_grad else [])])
    torch.testing.assert_close(results[:3], results[3:])


@pytest.mark.parametrize("given", ["smaller", "double"])
@pytest.mark.eager("op by op: what they read is changed", some=True)
def test_results_that_are_views_become_others(given):
    results = []
    for f in (vitrify.compile(VIEWS["one"], fullgraph=True), VIEWS["one"]):
        x, = leafs((4, 8))
        a, b = f(x)
        a.data = a.data[:2, :2] if given == "smaller" else a.data.double() * 3
        try:
            results.append(torch.autograd.grad(b.sum(), x))
        except RuntimeError:
            results.append(None)
    assert (results[0] is None) == (results[1] is None)
    if results[0]:
        torch.testing.assert_close(*results)


WRITTEN = {
    "saved by another": lambda a, x: a.mul_(2) * x,
    "written in part": lambda a, x: (a[0].mul_(2), a * x)[1],
    "a view of it": lambda a, x: a.mul_(2).view(-1).sin() + x.view(-1),
    "saved by what wrote": lambda a, x: a.exp_() + x,
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("fn", WRITTEN)
def test_arguments_that_were_written(fn, trained):
    """As it was after the write was read."""
    results = []
    for f in (vitrify.compile(WRITTEN[fn], fullgraph=True), WRITTEN[fn]):
        w, x = leafs((4, 8), (4, 8))
        a = w * 1.5 if trained else w.detach()
        out = f(a, x)
        a.data = other(a)
        out.sum().backward()
        results.append([x.grad, w.grad])
    torch.testing.assert_close(*results)


CHECKPOINTED = {
    "matrices": lambda x, w: x @ w,
    "made again": lambda x, w: (x @ w).tanh(),
    "product": lambda x, w: x * w,
    "a view": lambda x, w: (w.t() @ x).sin(),
    "linear": lambda x, w: F.linear(x, w).sin(),
}


@pytest.mark.parametrize("found", [False, True], ids=["passed", "found"])
@pytest.mark.parametrize("which", ["x", "w", "both"])
@pytest.mark.parametrize("fn", CHECKPOINTED)
def test_checkpoints(fn, which, found):
    """What is computed again was of the new memory, and what the formulas read was of the old."""
    def program(x, w):
        if found:
            return checkpoint(lambda x: CHECKPOINTED[fn](x, w), x, use_reentrant=False) * 2
        return checkpoint(CHECKPOINTED[fn], x, w, use_reentrant=False) * 2
    results = []
    for f in (vitrify.compile(program, fullgraph=True), program):
        x, w = leafs((8, 8), (8, 8))
        out = f(x, w)
        if which == "both":
            x.data, w.data = w.data, x.data
        else:
            changed = x if which == "x" else w
            changed.data = other(changed)
        out.sum().backward()
        results.append([x.grad, w.grad])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("pack", [lambda t: t, lambda t: t.detach()], ids=["itself", "detached"])
def test_hooks_of_the_program(pack):
    """What its hooks give back is given a history of its own by autograd, and keeps the memory that it has then."""
    def program(x, w):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return (x * w).sin() * w
    results = []
    for f in (vitrify.compile(program, fullgraph=True), program):
        x, w = leafs((8, 8), (8, 8))
        out = f(x, w)
        w.data = other(w)
        out.sum().backward()
        results.append([x.grad, w.grad])
    torch.testing.assert_close(*results)


SAVED = {
    "input of a sine": lambda x: (lambda a: (a, a.sin()))(x * 1),
    "a result too": lambda x: (lambda a: (a, a * a))(x.exp()),
    "a view": lambda x: (lambda a: (lambda v: (v, v.sin(), a))(a[:]))(x * 1),
    "transposed": lambda x: (lambda a: (a.t(), a.t() @ a))(x * 1),
    "a product": lambda x: (lambda a: (a, a @ a.sin()))(x * 1),
    "only a result": lambda x: (lambda a: (a, a * 1))(x.exp()),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("twice", [False, True], ids=["", "twice"])
@pytest.mark.parametrize("name", SAVED)
@pytest.mark.eager("op by op: what they read is changed", some=True)
def test_assigned_and_gone(name, twice, when):
    """Eager's node holds what it has saved: that the user has dropped it does not bring back what it was."""
    def run(f):
        x = torch.linspace(0.2, 1.4, 9, dtype=torch.float64).view(3, 3).requires_grad_()
        a, b, *_ = f(x)
        del _
        if when == "before":
            a.data = a.data * 1.5 + 0.1
            del a
        g, = torch.autograd.grad(b.square().sum(), x, create_graph=twice, retain_graph=True)
        if when == "after":
            a.data = a.data * 1.5 + 0.1
            del a
        return g.detach(), torch.autograd.grad(g.square().sum() if twice else b.square().sum(), x)[0]
    for _ in range(2):
        torch.testing.assert_close(run(vitrify.compile(SAVED[name], fullgraph=True)), run(SAVED[name]))


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("fn", [torch.sin, lambda a: a * a.sin(), lambda a: a.view(9).sin().view(3, 3)], ids=["itself", "twice", "a view of it"])
def test_given_assigned_and_gone(fn, constant):
    def program(a, x):
        return fn(a) * x

    def run(f):
        x = torch.linspace(0.2, 1.4, 9, dtype=torch.float64).view(3, 3).requires_grad_()
        a = x.detach() + 1 if constant else x * 1
        y = f(a, x)
        a.data = a.data * 1.5 + 0.1
        del a
        return torch.autograd.grad(y.sum(), x)[0]
    torch.testing.assert_close(run(vitrify.compile(program, fullgraph=True)), run(program))


def test_what_is_gone_is_not_held():
    """Neither the tensor, nor its memory where it was not assigned to; of what was, the last memory goes with the backward."""
    def storage(t):
        return StorageWeakRef(t.untyped_storage())

    f = vitrify.compile(lambda x: (lambda a: (a[:1], a[1:], (a[:1].sin() * a[1:].sin()).exp()))(x * 1), fullgraph=True)
    x = torch.ones(2, 1000, requires_grad=True)
    for _ in range(3):
        a, b, y = f(x)
        first = storage(a)
        b.data = torch.zeros(1, 1000)
        last = storage(b)
        del a, b
        y.sum().backward()
        del y
        assert first.expired() and last.expired()
    a, b, y = f(x)
    b.data = torch.zeros(1, 1000)
    last = storage(b)
    del a, b, y
    assert last.expired()


def test_dual_numbers_of_what_is_followed():
    """Tensors that a call follows may be the primals of dual numbers, before and after it."""
    f = vitrify.compile(lambda x: (lambda a: (a, a.sin()))(x * 1), fullgraph=True)
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.forward_ad.dual_level():
        a, b = f(x)
        assert torch.autograd.forward_ad.unpack_dual(a).tangent is None
        d = torch.autograd.forward_ad.make_dual(a, torch.full((3,), 2.0))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(d.sin()).tangent, 2 * a.cos())
        a.data = torch.zeros(3)
        del a, d
        assert torch.equal(torch.autograd.grad(b.sum(), x)[0], torch.ones(3))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("which", [1, 2], ids=["value", "view"])
@pytest.mark.eager("op by op: what they read is changed", some=True)
def test_assigned_in_each_step(which, order):
    """The derivative that reads what was assigned was made anew by each backward, and never let go of."""
    def program(x, w):
        h = x * w
        v = h.view(-1)
        return (h * h).sum() + (v * v * v).sum(), h, v

    def step(f):
        x, w = leaf(0), leaf(1)
        out = f(x, w)
        out[which].data = other(out[which])
        g, = torch.autograd.grad(out[0], x, create_graph=order == 2)
        if order == 1:
            return [g]
        out[which].data = out[which].data * 1.5
        return [g.detach(), *torch.autograd.grad(g.square().sum(), (x, w))]

    compiled, expected = vitrify.compile(program, fullgraph=True), step(program)
    spent = []
    for _ in range(4):
        torch.testing.assert_close(step(compiled), expected)
        spent.append([vitrify._C.stage_times().get(stage, 0) for stage in ("derivative", "split")])
    assert spent[1] == spent[-1]
