"""A compiled call in grad mode is one autograd function among others: gradients, hooks, errors and memory are eager's."""
import gc
import weakref

import gradients
import pytest
import torch
import torch.nn.functional as F
import vitrify
from beside import cases, program
from gradients import check, leaf, leaves, only
from torch import nn

# ---- gradients: values, None, strides, dtype

TWO = leaves((2, 3), (2, 3))
BASIC = [
    ("return (x * y).sum()", {}),
    ("return x * 2 + y.sin()", {}),
    ("return torch.tanh(x) @ y.t()", {}),
    ("return F.gelu(x).sum(0), F.softmax(y, -1)", {}),
    ("return F.layer_norm(x, (32,), y[0], y[1])", {"make": leaves((4, 32), (2, 32))}),
    ("return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)", {}),
    ("return x.exp().log1p().sqrt(), x.pow(3), x ** y", {}),
    ("return torch.where(x > 0.9, x, y) + torch.maximum(x, y) + x.clamp(0.6, 1.2)", {}),
    ("return x.max(1).values, x.amax(0), x.topk(2).values, x.sort(-1).values", {}),
    ("return x.cumsum(1), x.prod(0), x.norm(), x.logsumexp(1)", {}),
    ("return torch.cat([x, y, x]), torch.stack([x, y])", {}),
    ("return x[:, 1:] * y[:, :2], x[0] + y[1], x[[0, 0, 1]]", {}),
    ("return x.index_select(0, torch.tensor([1, 1])), x.gather(1, torch.tensor([[0, 2], [1, 1]]))", {}),
    ("return x.expand(4, 2, 3) * 2, y.repeat(2, 1), x.t() * 3", {}),
    ("return F.cross_entropy(x, torch.tensor([0, 2])), F.mse_loss(x, y)", {}),
    ("return x.masked_fill(x > 1, 0.0), x.tril(), x.flip(0), x.roll(1, 0)", {}),
    ("return x.double() * y, (x.bfloat16() * 2).float()", {}),
    # of some results nothing is known, or nothing needs a gradient
    ("return x * y, x.detach() + 1, x > y, x.argmax(1)", {}),
    ("return x * 2", {}),  # y is unused: None
    ("return x * 2, 5, None, 'text', [y + 1]", {}),
    ("return x.detach() * 2 + y", {"native": "forward"}),  # the gradient is the tangent
    ("return x * y.detach(), x.data + y.data", {}),
    # equal gradients, and gradients that are the tangent: each in memory of its own
    ("return x + y", {"native": "forward"}),
    ("return (x + y).sum()", {"native": "forward"}),
    ("return x - y, x + y", {}),
    ("return x + x", {}),
    ("return torch.add(x, y), x * 1.0, y * 1.0", {}),
    ("return x.t() + y.t()", {"native": "forward"}),
    ("return x.clone(), y + 0", {"native": "forward"}),
    # strides: what autograd returns is what is accumulated
    ("return x.sum()", {"native": "forward"}),
    ("return x * x", {"make": lambda: [leaf(3, 2).detach().t().requires_grad_(), leaf(3, 2).detach().t().requires_grad_()]}),
    ("return (x * y).sum(0)", {"make": lambda: [leaf(4, 6).detach()[:, ::2].requires_grad_(), leaf(3, 4).detach().t().requires_grad_()]}),
    ("return x * y", {"make": lambda: [leaf(2, 1).detach().expand(2, 3).requires_grad_(), leaf(2, 3)]}),
    ("return F.conv2d(x, y, padding=1)", {"make": lambda: [leaf(1, 2, 5, 5).detach().to(memory_format=torch.channels_last).requires_grad_(), leaf(3, 2, 3, 3)], "native": "none"}),
    # dtypes
    ("return x * y", {"make": leaves((2, 3), (2, 3), dtype=torch.float64)}),
    ("return x * y", {"make": leaves((2, 3), (2, 3), dtype=torch.bfloat16)}),
    ("return x * y", {"make": lambda: [leaf(2, 3), leaf(2, 3, dtype=torch.float64)]}),
    ("return x * y", {"make": lambda: [leaf(2, 3, dtype=torch.bfloat16), leaf(2, 3)]}),
    ("return x * y.to(x.dtype), y * 2", {"make": lambda: [leaf(2, 3), torch.arange(6).reshape(2, 3)]}),
    # broadcasting, numbers, no elements, no dims
    ("return x * y + 1", {"make": leaves((2, 3), (3,))}),
    ("return x * y", {"make": leaves((), (2, 3))}),
    ("return x * y, x.sum()", {"make": leaves((0, 3), (0, 3)), "native": "none"}),
    ("return (x / y).sum(1), x * float(2)", {"make": leaves((1, 1), (1, 1))}),
    ("return torch.view_as_real(torch.complex(x, y) * 2j)", {"native": "none"}),
]


@cases(BASIC)
def test_gradients(text, more):
    check(program(text), **{"make": TWO, **more})


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("text", ["return x * y", "return torch.tanh(x) @ y.t(), x + 1, y * 3"])
def test_inputs_that_need_no_gradient(text, needs):
    check(program(text), lambda: [leaf(2, 3, grad=needs[0]), leaf(2, 3, seed=2, grad=needs[1])], native="forward")


@pytest.mark.parametrize("text", ["return x * y", "return (x * y).sum(0), x.exp()"])
def test_inputs_that_are_no_leaves(text):
    check(program(text), TWO, before=lambda x, y: [x * 2, y.exp()])


def test_inputs_that_are_views_of_what_needs_gradients():
    check(program("return x * y"), leaves((3, 2), (4, 3)), before=lambda x, y: [x.t(), y[1:3]])


# ---- several results, some used

SOME = [
    ("return x * 2, torch.log(y)", (0,)),
    ("return x * 2, torch.log(x)", (0,)),  # at zero: a zero gradient for the second would make NaN of it
    ("return x * 2, torch.log(x)", (1,)),
    ("return x * y, x + 1, y.exp()", (0, 2)),
    ("return x * y, x + 1, y.exp()", (1,)),
    ("z = x * 2; return z, z[0], z.t()", (1,)),
    ("z = x * 2; return z, z[0], z.t()", (0, 2)),
    ("return x.detach() + 1, x * y, y.argmax(), y.sum()", (3,)),
    ("a, b = x.split(1); return a * 2, b * y", (1,)),
]


@pytest.mark.parametrize("text, used", SOME, ids=[f"{t} {u}" for t, u in SOME])
def test_some_results_used(text, used):
    def make():
        x, y = leaf(2, 3), leaf(2, 3, seed=2)
        with torch.no_grad():
            x[0, 0] = 0
        return [x, y]
    check(program(text), make, then=only(*used), native="forward")


def test_the_parameter_of_an_unused_head_has_no_gradient(compiles):
    m = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    fn = vitrify.compile(lambda x: (m["a"](x), m["b"](x)))
    a, _ = fn(torch.randn(4, 3))
    a.sum().backward()
    assert m["a"].weight.grad is not None and m["b"].weight.grad is None and m["b"].bias.grad is None
    _, b = fn(torch.randn(4, 3))
    b.sum().backward()
    assert m["b"].weight.grad is not None


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_an_unused_head_is_silent(register, keep, compiles):
    m = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    seen = []
    getattr(m["b"].weight, register)(lambda g: seen.append(g))
    a, b = vitrify.compile(lambda x: (m["a"](x), m["b"](x)))(torch.randn(4, 3))
    a.sum().backward(retain_graph=keep)
    assert seen == []
    if keep:
        b.sum().backward()
        assert len(seen) == 1 and seen[0] is not None and m["b"].weight.grad is not None


def test_a_hook_that_another_way_leads_to(compiles):
    """The compiled call gives its tensor no gradient, and something else does."""
    for f in (lambda fn: fn, vitrify.compile):
        w, v, seen = leaf(3), leaf(3, seed=2), []
        w.register_hook(lambda g: seen.append(g))
        a, _ = f(lambda w, v: (v * 2, w * 3))(w, v)
        (a + w * 5).sum().backward()
        assert len(seen) == 1 and torch.equal(w.grad, torch.full((3,), 5.0)) and torch.equal(v.grad, torch.full((3,), 2.0))


def test_what_comes_before_an_unused_result_is_not_run(compiles):
    class Counted(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx, t):
            return t.view_as(t)

        @staticmethod
        def backward(ctx, g):
            Counted.calls += 1
            return g
    x, y = leaf(3), leaf(3, seed=2)
    fn = vitrify.compile(lambda a, b: (a * 2, b * 3))
    fn(x, Counted.apply(y))[0].sum().backward()
    assert Counted.calls == 0 and y.grad is None and x.grad is not None
    shared = y.exp()
    (fn(x, Counted.apply(shared))[0] + shared).sum().backward()
    torch.testing.assert_close(y.grad, y.exp().detach())


def test_each_set_of_results_is_compiled_once(compiles):
    fn = vitrify.compile(lambda x: (x.sin(), x.cos(), x.exp()))
    built = []
    for use in [(0,), (1, 2), (0, 1, 2), (0,), (1, 2), (0, 1, 2)]:
        x = leaf(5)
        out = fn(x)
        sum(out[i].sum() for i in use).backward()
        torch.testing.assert_close(x.grad, sum([x.cos(), -x.sin(), x.exp()][i] for i in use).detach())
        built.append(vitrify.counters["kernels_built"])
    assert built[2] == built[5]


# ---- torch.autograd.grad

@pytest.mark.parametrize("text, how", [
    ("return x * y", dict(inputs=(0,))), ("return x * y", dict(inputs=(1,))), ("return x * y", dict(inputs=(0, 1))), ("return x.exp()", dict(inputs=(0, 1), allow_unused=True)),
    ("return x.exp()", dict(inputs=(0, 1))), ("return x.exp(), y.exp()", dict(inputs=(1,))), ("return x.exp()", dict(inputs=(0, 1), materialize_grads=True)),
    ("return x.sum()", dict(inputs=(0,))), ("return x.mean(), (x * y).sum()", dict(inputs=(1, 0))),
    ("return x.t().contiguous(), y.expand(2, 2, 3)", dict(inputs=(1, 0))),
])
def test_autograd_grad(text, how):
    def then(out, args):
        heads = gradients.differentiable(out)
        return torch.autograd.grad(heads, [args[i] for i in how["inputs"]], gradients.weights(heads), **{k: v for k, v in how.items() if k != "inputs"})
    check(program(text), TWO, then=then, native="forward")


def test_grad_with_respect_to_a_result():
    def then(out, args):
        return torch.autograd.grad((out[0] * out[1]).sum(), [*out, args[0]])
    check(program("return x * y, x.sin()"), TWO, then=then)


def test_backward_with_inputs():
    check(program("return x * y"), TWO, then=lambda out, args: out.sum().backward(inputs=[args[1]]))


def test_wrong_shapes_of_gradients_raise_as_in_eager():
    check(program("return x * y"), TWO, then=lambda out, args: out.backward(torch.ones(3, 3)), native="forward")
    check(program("return x * y"), TWO, then=lambda out, args: out.backward(), native="forward")


@pytest.mark.parametrize("tangent", [lambda s: torch.ones(()).expand(s), lambda s: torch.arange(6.0).reshape(3, 2).t(), lambda s: torch.arange(12.0).reshape(2, 6)[:, ::2],
                                     lambda s: torch.ones(s, dtype=torch.float64), lambda s: torch.zeros(s)], ids=["expanded", "transposed", "strided", "float64", "zeros"])
def test_gradients_in_any_layout(tangent):
    check(program("return x * y, x.sin()"), TWO, then=lambda out, args: torch.autograd.backward(out[0], tangent((2, 3))))


# ---- several backward calls

def test_retain_graph():
    def then(out, args):
        out.sum().backward(retain_graph=True)
        first = [a.grad.clone() for a in args]
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        return first
    check(program("return torch.tanh(x * y)"), TWO, then=then)


def test_backward_twice_raises_as_in_eager():
    def then(out, args):
        out.sum().backward()
        out.sum().backward()
    check(program("return torch.tanh(x * y)"), TWO, then=then)


def test_backward_twice_through_different_results():
    def then(out, args):
        out[0].sum().backward(retain_graph=True)
        out[1].sum().backward()
    check(program("return x * y, x.exp()"), TWO, then=then)


def test_accumulation():
    def then(out, args):
        kept = args[0].grad
        out.sum().backward()
        return kept is args[0].grad, args[0].grad_fn is None

    def make():
        x, y = TWO()
        return [x, y]
    w = leaf(2, 3, seed=9)
    fn = program("return x * w", w=w)
    compiled = vitrify.compile(fn)
    for _ in range(3):
        compiled(leaf(2, 3)).sum().backward()
    ours, w.grad = w.grad, None
    for _ in range(3):
        fn(leaf(2, 3)).sum().backward()
    gradients.same_grads([ours], [w.grad])
    assert vitrify.counters["compiled_calls"] == 6
    check(fn, make, then=then, extra=(w,))


def test_an_argument_that_has_a_gradient():
    def make():
        x, y = TWO()
        x.grad = torch.ones(2, 3)
        return [x, y]
    check(program("return x * y"), make)


def test_two_calls_share_their_inputs(compiles):
    x = leaf(4)
    fn = vitrify.compile(lambda x: (x * x).exp())
    (fn(x) + fn(x).sin()).sum().backward()
    y = leaf(4)
    g = lambda x: (x * x).exp()  # noqa: E731
    (g(y) + g(y).sin()).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_calls_in_a_chain(compiles):
    f, g = vitrify.compile(lambda x: x.sin() * 2), vitrify.compile(lambda x: (x.exp(), x * x))
    x, y = leaf(4), leaf(4)
    for run, a in (((lambda a: g(f(a))), x), ((lambda a: ((a.sin() * 2).exp(), (a.sin() * 2) ** 2)), y)):
        p, q = run(a)
        (p * q.cos()).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


# ---- gradients that users hold

def test_gradients_are_free_of_each_other(compiles):
    """No write to one shows in another, in the tangent, or in a result."""
    x, y = TWO()
    out = vitrify.compile(lambda x, y: x + y)(x, y)
    tangent = torch.ones(2, 3)
    out.backward(tangent)
    for g in (x.grad, y.grad):
        assert compare_storage(g) not in {compare_storage(t) for t in (tangent, out, x, y)}
    x.grad.zero_()
    assert y.grad.sum() == 6 and tangent.sum() == 6
    assert x.grad.untyped_storage().nbytes() == 24


def compare_storage(t):
    return t.untyped_storage().data_ptr()


def test_gradients_returned_by_grad_are_free_of_what_was_saved():
    def then(out, args):
        a, b = torch.autograd.grad(out.sum(), args, retain_graph=True)
        a.mul_(0)
        b.mul_(0)
        return torch.autograd.grad(out.sum(), args)
    check(program("return x * y"), TWO, then=then)


# ---- memory

def test_what_was_saved_is_freed_after_backward(compiles):
    x = leaf(1000)
    out = vitrify.compile(lambda x: (x.sin() * x.cos()).sum())(x)
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()
    ref = weakref.ref(x)
    del x, out
    gc.collect()
    assert ref() is None


def test_a_result_dropped_frees_its_inputs(compiles):
    w = leaf(3)
    fn = vitrify.compile(lambda x: (x * w).exp())
    x = leaf(3)
    ref = weakref.ref(x)
    out = fn(x)
    del x
    out = out.detach()
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("text", ["return x.exp()", "return torch.tanh(x * y)", "z = x * y; return z.sigmoid(), z.exp()"])
def test_no_cycle_through_saved_results(text, compiles):
    """A result that its own node keeps must not keep itself."""
    x, y = TWO()
    out = vitrify.compile(program(text))(x, y)
    refs = [weakref.ref(t) for t in (out if isinstance(out, tuple) else [out])]
    gc.disable()
    try:
        del out
        assert all(r() is None for r in refs)
    finally:
        gc.enable()


def test_no_cycle_through_written_arguments(compiles):
    w = leaf(3)
    fn = vitrify.compile(lambda x: x.mul_(w).sum())
    for _ in range(2):
        x = leaf(3) * 2
        out = fn(x)
        ref = weakref.ref(x)
        gc.disable()
        try:
            del x, out
            assert ref() is None
        finally:
            gc.enable()


def test_the_first_call_is_not_kept(compiles):
    """Nothing of the call that was captured outlives it."""
    fn = vitrify.compile(lambda x, y: (x.sin() * y, y.exp()))
    refs = []
    for use in (0, 1, 0):
        x, y = leaf(5), leaf(5)
        refs += [weakref.ref(x), weakref.ref(y)]
        fn(x, y)[use].sum().backward()
    del x, y
    gc.collect()
    assert [r() for r in refs] == [None] * 6


# ---- versions

VERSIONS = [
    # (program, what happens between forward and backward): eager's error where eager has one, and the right gradient where not
    ("return x.exp()", "x.mul_(5)"),
    ("return (x + 1).exp()", "x.mul_(5)"),
    ("return x.sin()", "x.mul_(5)"),
    ("return x * y", "x.mul_(5)"),
    ("return x * y", "y.mul_(5)"),
    ("return x + y", "x.mul_(5)"),
    ("return x.exp()", "out.mul_(5)"),
    ("return x.sin()", "out.mul_(5)"),
    ("return x.sin(), x.exp()", "out[0].mul_(5)"),
    ("return x.sin(), x.exp()", "out[1].mul_(5)"),
    ("return (x + 1).tanh() * 2", "x.zero_()"),
    ("z = x * 2; return z, z.exp()", "out[0].zero_()"),
    ("z = x * 2; return z, z.sin()", "out[0].zero_()"),
    ("return F.relu(x + 1)", "x.zero_()"),
    ("return x @ y.t()", "x[0].zero_()"),
    ("return F.softmax(x, -1)", "x.zero_()"),
    ("return F.softmax(x, -1)", "out.zero_()"),
    ("return x.t() @ y", "x.zero_()"),
    ("return x.view(-1).sin().sum() + x.reshape(6).exp().sum()", "x.zero_()"),
    ("return x.clone().sin()", "x.zero_()"),
    ("return x.double().sin()", "x.zero_()"),
    ("return F.layer_norm(x, (3,))", "x.zero_()"),
    ("return x.sum(), x.mean()", "x.zero_()"),
]


@pytest.mark.parametrize("text, change", VERSIONS, ids=[f"{t} | {c}" for t, c in VERSIONS])
def test_what_is_changed_between_forward_and_backward(text, change):
    def then(out, args):
        with torch.no_grad():
            exec(change, {"x": args[0], "y": args[1], "out": out})
        gradients.backward(out, args)
    check(program(text), TWO, then=then, before=lambda x, y: [x, y], native="forward")


@pytest.mark.parametrize("change, used, fails", [("out[1].mul_(5)", 0, False), ("out[1].mul_(5)", 1, True), ("args[1].mul_(5)", 0, False), ("args[0].mul_(5)", 0, True), ("args[0].mul_(5)", 1, False)])
def test_only_what_is_needed_is_checked(change, used, fails):
    """Through one result: what the derivative of the other needs may have changed."""
    def then(out, args):
        with torch.no_grad():
            exec(change, {"out": out, "args": args})
        only(used)(out, args)
    fn = program("return x.sin(), y.exp()")
    check(fn, TWO, then=then, native="forward")
    assert (gradients.Run(fn, TWO(), then).later is not None) == fails


@pytest.mark.parametrize("text", ["return x * w", "return x + w", "return (x + w).exp()", "return F.linear(x, w)"])
def test_a_parameter_changed_between_forward_and_backward(text):
    def then(out, args):
        with torch.no_grad():
            w.add_(0)
        gradients.backward(out, args)
    w = leaf(2, 3, seed=5)
    check(program(text, w=w), leaves((2, 3)), then=then, extra=(w,), native="forward")


def test_a_change_that_needs_gradients():
    """In place on a result, with a gradient: the new history is followed."""
    def then(out, args):
        out[0].mul_(args[1])
        out[1][0].mul_(2)
        gradients.backward(out, args)
    check(program("return x.sin(), x * y"), TWO, then=then)
