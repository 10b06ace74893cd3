"""Gradients of gradients (capture.md, C12): the joint program of inputs and tangents is a compiled, differentiable region of its own, to any order."""
import copy
import gc
import weakref

import gradients
import pytest
import torch
import torch.nn.functional as F
import vitrify
from beside import cases, program
from gradients import check, leaf, leaves
from torch import nn

TWO = leaves((2, 3), (2, 3), dtype=torch.float64)


def twice(used=None, times=1):
    """Gradients with create_graph through the results `used`, and theirs in turn; .grad is of the last."""
    def then(out, args):
        heads = gradients.differentiable(out)
        heads = heads if used is None else [heads[i] for i in used]
        to, told = [a for a in args if a.requires_grad], []
        for _ in range(times):
            grads = torch.autograd.grad(heads, to, gradients.weights(heads), create_graph=True, allow_unused=True)
            told.append([g if g is None else g.detach() for g in grads])
            heads = [g for g in grads if g is not None and g.requires_grad]
        if heads:
            torch.autograd.backward(heads, gradients.weights(heads))
        return told
    return then


PROGRAMS = [
    ("return x * y", {}),
    ("return (x.sin() * y).sum()", {}),
    ("return torch.tanh(x @ y.t()), x.exp()", {}),
    ("return F.gelu(x) * F.softmax(y, -1)", {}),
    ("return F.layer_norm(x, (3,), y[0], y[1])", {}),
    ("return F.batch_norm(x, None, None, y[0], y[1], training=True)", {}),
    ("return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True), y.prod(0)", {}),
    ("return torch.cat([x, y]).logsumexp(0), x[:, 1:] * y[:, :2]", {}),
    ("return F.cross_entropy(x, torch.tensor([0, 2])) + F.mse_loss(x, y)", {}),
    ("return x.cumsum(1).pow(3), x.norm() * y.t()", {}),
    ("return x * y.detach(), y.exp()", {}),
    ("z = x * y; z[0] = x[1]; return z.sin(), z", {}),
    ("with torch.no_grad():\n        z = x * y\n    return z * x", {}),
    ("return F.conv2d(x, y, padding=1).sigmoid()", {"make": leaves((1, 2, 5, 5), (3, 2, 3, 3), dtype=torch.float64)}),
    ("return F.dropout(x, 0.5) * y.exp(), F.dropout(x * y, 0.2).sin()", {}),
    ("z = x * 2; return z.pow(3), z[0].exp(), z.t()", {}),
]


@cases(PROGRAMS)
def test_second_order(text, more):
    check(program(text), **{"make": TWO, "then": twice(), "native": "forward", **more})


@pytest.mark.parametrize("text", ["return x.exp() * y.sin()", "return torch.tanh(x @ y.t())", "return F.softmax(x, -1) * y"])
def test_third_and_fourth_order(text):
    for times in (2, 3):
        check(program(text), TWO, then=twice(times=times))


@pytest.mark.parametrize("text", ["return x * y, x.exp()", "return F.softplus(x) @ y.t()", "return F.layer_norm(x, (3,)) * y", "return (x * y).var(0)"])
def test_gradgradcheck(text):
    compiled = vitrify.compile(program(text), fullgraph=True)
    assert torch.autograd.gradcheck(compiled, TWO()) and torch.autograd.gradgradcheck(compiled, TWO())
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["eager_calls"] == 0


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_through_some_of_the_results(used):
    """The region of the second order is that of the tangents there are."""
    check(program("return x.exp() * y, y.sin()"), TWO, then=twice(used), native="forward")


def test_some_inputs_need_no_gradient():
    check(program("return (x * y).exp()"), lambda: [leaf(2, 3, dtype=torch.float64), leaf(2, 3, dtype=torch.float64, grad=False)], then=twice())


def test_with_respect_to_one_input_alone():
    """The gradient of the other is not asked for, and nothing of it is noticed."""
    def then(out, args):
        (g,) = torch.autograd.grad(out.sum(), args[0], create_graph=True)
        return torch.autograd.grad(g.sum(), args[1], retain_graph=True), torch.autograd.grad(out.sum(), args[1])
    check(program("return (x * y).exp()"), TWO, then=then)


def test_arguments_that_are_no_leaves():
    check(program("return (x * y).exp()"), TWO, before=lambda x, y: [x * 2, y.t().contiguous().t()], then=lambda out, args: twice()(out, args))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1)).double()


def test_a_gradient_penalty_trains_as_in_eager():
    ours, eager = model(), model()
    losses = []
    for m, f in ((ours, vitrify.compile(ours, fullgraph=True)), (eager, eager)):
        opt = torch.optim.Adam(m.parameters(), 1e-2)
        for step in range(5):
            x = leaf(6, 4, seed=step, dtype=torch.float64)
            out = f(x)
            (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = out.square().mean() + (g.norm(dim=1) - 1).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.detach())
    torch.testing.assert_close(losses[:5], losses[5:])
    torch.testing.assert_close(list(ours.parameters()), list(eager.parameters()))
    assert vitrify.counters["captures"] == 1 and vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0


def test_hessian_vector_products():
    fn = program("return (x.sin() * y.exp()).sum()")
    compiled, given = vitrify.compile(fn, fullgraph=True), tuple(TWO())
    v = tuple(torch.randn_like(t) for t in given)
    for of in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        torch.testing.assert_close(of(compiled, given, v), of(fn, given, v))
    torch.testing.assert_close(torch.autograd.functional.hessian(compiled, given), torch.autograd.functional.hessian(fn, given))
    assert vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0


def test_parameters_of_a_module():
    ours = model()
    eager, x = copy.deepcopy(ours), torch.randn(5, 4, dtype=torch.float64)
    grads = []
    for m, f in ((ours, vitrify.compile(ours, fullgraph=True)), (eager, eager)):
        first = torch.autograd.grad(f(x).square().sum(), list(m.parameters()), create_graph=True)
        grads.append(torch.autograd.grad(sum(g.square().sum() for g in first), list(m.parameters())))
    torch.testing.assert_close(*grads)
    assert [g.shape for g in grads[0]] == [g.shape for g in grads[1]]
    assert vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0


def test_the_graph_is_kept_and_freed_as_in_eager():
    def then(out, args):
        grads = torch.autograd.grad(out.sum(), args, create_graph=True)
        sum(g.sum() for g in grads).backward(retain_graph=True)
        sum(g.sum() for g in grads).backward()
        sum(g.sum() for g in grads).backward()  # raises
    check(program("return (x * y).exp()"), TWO, then=then)


def test_what_was_kept_goes_with_the_graph(compiles):
    x = leaf(100, dtype=torch.float64)
    out = vitrify.compile(lambda x: (x.sin() * x.cos()).sum())(x)
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    g.sum().backward()
    ref = weakref.ref(x)
    x.grad = None
    del x, out, g
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("change", ["x.mul_(2)", "y.mul_(2)"])
def test_an_input_changed_before_the_second_backward(change):
    def then(out, args):
        grads = torch.autograd.grad(out.sum(), args, create_graph=True)
        with torch.no_grad():
            exec(change, {"x": args[0], "y": args[1]})
        sum(g.sum() for g in grads).backward()
    check(program("return (x * y).exp()"), TWO, then=then)


def test_create_graph_and_no_second_backward():
    check(program("return (x * y).exp()"), TWO, then=lambda out, args: out.sum().backward(create_graph=True) or [a.grad.requires_grad for a in args])


def test_what_reads_values():
    """Random numbers are those of the program."""
    index = torch.tensor([0, 1, 0])
    before = vitrify.counters["fallbacks"]
    check_second(lambda x, y: F.dropout(x.index_reduce(1, index, y, "prod"), 0.5) * y)
    assert vitrify.counters["fallbacks"] == before


def check_second(fn):
    grads = []
    for f in (fn, vitrify.compile(fn, fullgraph=True)):
        torch.manual_seed(4)
        given = TWO()
        out = f(*given)
        tangent = torch.ones_like(out, requires_grad=True)
        first = torch.autograd.grad(out, given, tangent, create_graph=True)
        grads.append([*first, *torch.autograd.grad(first, [*given, tangent], gradients.weights(first))])
    torch.testing.assert_close(*grads)


def test_gradients_that_overlap_themselves():
    """Of a sum: the tangent, expanded."""
    fn = program("return x.sum() * 1, (x * y).sum(0), y.sum()")
    for f in (fn, vitrify.compile(fn, fullgraph=True)):
        x, y = TWO()
        out = f(x, y)
        tangents = [torch.ones_like(t, requires_grad=True) for t in out]
        (g,) = torch.autograd.grad(out[2], y, tangents[2], create_graph=True)
        assert g.stride() == (0, 0) and g.requires_grad
        (back,) = torch.autograd.grad(g, tangents[2], torch.ones_like(g))
        assert back.item() == 6
    check(fn, TWO, then=twice(), native="forward")


@pytest.mark.parametrize("needs", [False, True])
def test_gradients_need_gradients_where_eagers_do(needs):
    """Of what is linear, when their tangents do."""
    def then(out, args):
        tangents = [t.requires_grad_(needs) for t in gradients.weights(out)]
        return [g.requires_grad for g in torch.autograd.grad(out, args, tangents, create_graph=True)]
    check(program("return x * 2, y.exp()"), TWO, then=then, native="forward")


def test_what_cannot_be_differentiated_twice_raises_as_in_eager():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return g * ctx.saved_tensors[0].cos()
    check(program("return Once.apply(x) * y", Once=Once), TWO, then=twice())


def test_a_program_that_writes_to_its_arguments():
    """What they were is kept where gradients follow from it."""
    away = dict(before=lambda x, y: [x * 1, y])
    fn = program("x.mul_(y); return x.sin()")
    check(fn, TWO, **away)
    check(fn, TWO, then=lambda out, args: [g.detach() for g in torch.autograd.grad(out.sum(), args[1:], create_graph=True)], native="forward", **away)


def test_sizes_that_change():
    fn = program("return (x * y).exp().sum(0)")
    compiled = vitrify.compile(fn, dynamic=True)
    for n in (2, 5, 3, 7):
        grads = []
        for f in (compiled, fn):
            x, y = leaves((n, 3), (n, 3), dtype=torch.float64)()
            (g,) = torch.autograd.grad(f(x, y).sum(), x, create_graph=True)
            grads.append(torch.autograd.grad(g.sum(), [x, y]))
        torch.testing.assert_close(*grads)
    assert vitrify.counters["eager_calls"] == 0
