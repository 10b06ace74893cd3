"""A result of a call that lies behind another one: its gradient, its hooks and its retained gradient see what comes through the others, as in eager."""
import gc

import pytest
import torch
import vitrify
import torch.nn.functional as F
from torch import nn



def R(*sizes, **how):
    return torch.randn(*sizes, dtype=torch.float64, **how)


def outcome(f, program, make):
    torch.manual_seed(0)
    args = make()
    seen = []
    try:
        got = program(f, seen, *args)
    except Exception as e:
        got = [type(e), str(e).partition("\n")[0]]
    return [got, seen, [a.grad for a in args if isinstance(a, torch.Tensor) and a.is_leaf]]


def check(fn, program, make=lambda: [R(4, 3, requires_grad=True)], **options):
    eager, ours = outcome(fn, program, make), outcome(vitrify.compile(fn, **options), program, make)
    same(ours, eager)


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            same(x, y)
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, equal_nan=True)
        assert a.stride() == b.stride()
    else:
        assert a == b


def two(x):
    a = x.sin()
    return a, a * 2


def chain(x):
    a = x.sin()
    b = a.exp() + x
    c = (b * a).tanh()
    return a, b, c


def apart(x):
    a = x.sin()
    b = x.cos()
    return a, b, a * b, b.exp(), (x * 3).sigmoid()


def views(x):
    a = x.sin()
    return a[0], a[1:], (a[0] * 2).sum() + a[1:].exp().sum(), a.t() * 3


def of_input(x):
    v = x.t()
    return v, v.exp(), x[0], (x[0] * v.sum()).sin()


def pieces(x):
    p, q = x.sin().chunk(2)
    return p, (p * q).exp(), q.cos()


def inner(x):
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    return s, (v.abs() * s[:, None]).sum(), u.abs()


def sliced(x):
    y = x.sin()
    p, q, r = y.unbind(1)
    return y, q, q * p, r.exp() + q


PROGRAMS = [two, chain, apart, views, of_input, pieces, inner, sliced]
programs = pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)


def total(outs):
    return sum((o * (i + 1)).sum() for i, o in enumerate(outs))


@programs
def test_a_gradient_of_one_result_through_another(fn):
    def program(f, seen, x):
        outs = f(x)
        for o in outs:
            for p in outs:
                seen.append(torch.autograd.grad(o.sum(), [p, x], retain_graph=True, allow_unused=True))
        return torch.autograd.grad(total(outs), [*outs, x])
    check(fn, program)


@programs
@pytest.mark.parametrize("which", [[0], [1], [0, 1], [-1], None])
def test_hooks(fn, which):
    def program(f, seen, x):
        outs = f(x)
        for i in range(len(outs)) if which is None else which:
            outs[i].register_hook(lambda g, i=i: (seen.append((i, g.clone())), g * 10)[1])
        total(outs[1:]).backward()
        seen.sort(key=lambda s: s[0])  # hooks of results that lead to no other run together
    check(fn, program)


@programs
@pytest.mark.parametrize("of", [slice(None), slice(1, 2), slice(2, None)], ids=["all", "second", "rest"])
def test_retained_gradients(fn, of):
    def program(f, seen, x):
        outs = f(x)
        for o in outs:
            o.retain_grad()
        if outs[of]:
            total(outs[of]).backward()
        return [o.grad for o in outs]
    check(fn, program)


@programs
def test_nobody_looks(fn):
    """Several backwards, through some results and all, add up."""
    def program(f, seen, x):
        for i in range(4):
            outs = f(x)
            total(outs[i % len(outs):]).backward()
            seen.append(x.grad.clone())
    check(fn, program)


@programs
def test_used_again_outside(fn):
    """What else is made of a result comes back to it too, before or after what comes through the program."""
    def program(f, seen, x):
        outs = f(x)
        more = outs[0].exp() * 2
        (total(outs[1:]) + more.sum() + (outs[-1] * outs[-1].detach()).sum()).backward(retain_graph=True)
        outs[0].register_hook(lambda g: (seen.append(g.clone()), None)[1])
        (more.sum() * total(outs)).backward()
    check(fn, program)


def test_each_order_of_two_users():
    def program(f, seen, x):
        for early in (True, False):
            if early:
                y = x * 1
            a, b = f(x)
            z = a.cos()
            torch.autograd.backward([b, z, a], [torch.ones_like(a)] * 3)
            seen.append(x.grad.clone())
    check(two, program)


def test_backward_with_inputs():
    def program(f, seen, x):
        a, b, c = f(x)
        c.sum().backward(inputs=[a, x], retain_graph=True)
        c.sum().backward(inputs=[b], retain_graph=True)
        c.sum().backward(inputs=[a])
        return [a.grad, b.grad]
    check(chain, program)


@pytest.mark.parametrize("first, second", [(i, j) for i in range(3) for j in range(3)])
@pytest.mark.parametrize("keep", [False, True])
def test_a_second_time(first, second, keep):
    def program(f, seen, x):
        outs = f(x)
        outs[0].register_hook(lambda g: seen.append(g.clone()))
        outs[first].sum().backward(retain_graph=keep)
        seen.append(x.grad.clone())
        outs[second].sum().backward()
    check(chain, program)


@pytest.mark.parametrize("first, second", [(i, j) for i in range(2) for j in range(2)])
def test_a_second_time_where_nobody_looks(first, second):
    def program(f, seen, x):
        outs = f(x)
        outs[first].sum().backward()
        seen.append(x.grad.clone())
        outs[second].sum().backward()
    check(two, program)


def test_a_gradient_up_to_one_result_and_then_from_there():
    def program(f, seen, x):
        a, b, c = f(x)
        g, = torch.autograd.grad(c.sum(), b)
        h, = torch.autograd.grad(b, a, g)
        a.backward(h)
    check(chain, program)


def test_hooks_of_nodes():
    def program(f, seen, x):
        a, b, c = f(x)
        a.grad_fn.register_prehook(lambda g: (seen.append(g[0].clone()), (g[0] * 2,))[1])
        b.grad_fn.register_hook(lambda gi, go: seen.append(go[0].clone()))
        c.sum().backward()
    check(chain, program)


def test_hooks_added_and_removed():
    def program(f, seen, x):
        a, b = f(x)
        h = a.register_hook(lambda g: g * 3)
        c = a * b
        a.register_hook(lambda g: (seen.append(g.clone()), None)[1])
        c.sum().backward(retain_graph=True)
        h.remove()
        c.sum().backward()
    check(two, program)


def test_a_hook_that_is_added_by_a_hook():
    def program(f, seen, x):
        a, b = f(x)
        b.register_hook(lambda g: (a.register_hook(lambda g: (seen.append(g.clone()), g * 5)[1]), None)[1])
        b.sum().backward()
    check(two, program)


def test_hooks_of_what_no_gradient_leads_to():
    def program(f, seen, x):
        outs = f(x)
        for i in range(2):
            outs[i].register_hook(lambda g, i=i: (seen.append(i), g * 2)[1])
        outs[4].sum().backward(retain_graph=True)
        outs[3].sum().backward(retain_graph=True)
        (outs[4].sum() + outs[0].exp().sum()).backward()
    check(apart, program)


def test_what_is_behind_of_which_one_gets_nothing():
    """A custom node outside the program, to which no gradient leads, is not run."""
    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, seen):
            ctx.seen = seen
            return x * 2

        @staticmethod
        def backward(ctx, g):
            ctx.seen.append("run")
            return g * 2, None

    def fn(x, y):
        a = y.sin()
        return a, a * 2, x.cos()

    def program(f, seen, x):
        outs = f(x, Node.apply(x, seen))
        if len(seen) == 0:
            outs[0].register_hook(lambda g: (seen.append("hook"), g)[1])
        outs[2].sum().backward(retain_graph=True)
        outs[1].sum().backward(retain_graph=True)
        outs[0].sum().backward()
    check(fn, program)


def test_written_inputs():
    def fn(x, h):
        h.add_(x)
        return h * 2, h.sin() + x

    def program(f, seen, x):
        h = x * 2
        b, c = f(x, h)
        h.register_hook(lambda g: (seen.append(g.clone()), g * 3)[1])
        seen.append(torch.autograd.grad(b.sum(), [h, x], retain_graph=True))
        (b.sum() + h.exp().sum() + c.sum()).backward()
    check(fn, program)


def test_written_inputs_that_nobody_looks_at():
    def fn(x, h):
        h.mul_(x)
        return h[0], h * 2, h[0] + 1

    def program(f, seen, x):
        h = x * 2
        v, b, c = f(x, h)
        (b.sum() + c.sum()).backward(retain_graph=True)
        seen.append(x.grad.clone())
        v.register_hook(lambda g: seen.append(g.clone()))
        (b.sum() + c.sum() + v.sum()).backward()
    check(fn, program)


class Clips(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1, 1)


def meets(x):
    n = torch.nn.functional.layer_norm(Clips.apply(x.tanh()), x.shape[-1:])
    a = n + x
    return a, n.exp(), a.sin() * 2


def meets_twice(x):
    n = Clips.apply(x)
    a, b = n.sin(), n.cos()
    m = Clips.apply(a * b)
    return a, b, m.exp(), m * a * 3


@pytest.mark.parametrize("fn", [meets, meets_twice], ids=lambda f: f.__name__)
@pytest.mark.parametrize("which", [[0], [1], [0, 1], []])
def test_what_meets_behind_them(fn, which):
    """A formula that is not linear has all of its gradient at once, and each is run once."""
    def program(f, seen, x):
        outs = f(x)
        for i in which:
            outs[i].register_hook(lambda g, i=i: (seen.append((i, g.clone())), g * 2)[1])
        total(outs).backward(retain_graph=True)
        total(outs[1:]).backward()
        seen.sort(key=lambda s: s[0])
    check(fn, program)


def test_a_view_of_an_argument_returned_twice():
    def program(f, seen, x):
        v, w, b = f(x)
        v.retain_grad()
        (b.sum() + w.exp().sum()).backward()
        return v is w, v.grad

    def fn(x):
        v = x.t()
        return v, v, v.sin()
    check(fn, program)


@programs
def test_gradients_that_have_gradients(fn):
    def program(f, seen, x):
        outs = f(x)
        first = torch.autograd.grad(total(outs[1:]), [outs[0], x], create_graph=True, allow_unused=True)
        seen.append([None if g is None else g.detach() for g in first])
        sum((g * g).sum() for g in first if g is not None and g.requires_grad).backward()
    check(fn, program)


def test_gradients_of_gradients_where_nobody_looks():
    def program(f, seen, x):
        a, b, c = f(x)
        g, = torch.autograd.grad(c.sum() + b.sum(), x, create_graph=True)
        (g * g).sum().backward()
    check(chain, program)


@pytest.mark.parametrize("fn", [two, chain, apart], ids=lambda f: f.__name__)
def test_batched(fn):
    def program(f, seen, x):
        outs = f(x)
        g = R(5, *outs[-1].shape)
        for to in ([outs[0]], [outs[0], x], [outs[1], x]):
            seen.append(torch.autograd.grad(outs[-1 if fn is not apart else 2], to, g, is_grads_batched=True, retain_graph=True, allow_unused=True))
    check(fn, program)


@pytest.mark.parametrize("fn", [two, chain, apart, pieces, sliced, views, of_input], ids=lambda f: f.__name__)
def test_dynamic(fn):
    f = vitrify.compile(fn, dynamic=True)

    def program(f, seen, x):
        outs = f(x)
        outs[0].register_hook(lambda g: (seen.append(g.clone()), g * 10)[1])
        outs[1].retain_grad()
        total(outs).backward()
        return outs[1].grad
    for n in (4, 6, 8):
        make = lambda: [R(n, 3, requires_grad=True)]
        same(outcome(f, program, make), outcome(fn, program, make))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        hidden = []
        for m in self.layers:
            x = x + m(x).relu()
            hidden.append(x)
        return x.square().mean(), hidden


def test_hidden_states_of_a_network():
    torch.manual_seed(0)
    m = Residual().double()

    def program(f, seen, x):
        m.zero_grad()
        loss, hidden = f(x)
        hidden[1].retain_grad()
        hidden[2].register_hook(lambda g: g.clamp(-0.01, 0.01))
        (loss + hidden[3].sum() * 0.1).backward()
        return [hidden[1].grad, *(p.grad.clone() for p in m.parameters())]
    check(m, program, lambda: [R(4, 8)])


def test_one_plan_where_nobody_looks():
    m = Residual().double()
    both, alone = vitrify.compile(m), vitrify.compile(lambda x: m(x)[0])
    x = R(4, 8)

    def launched(loss):
        before = vitrify.counters["kernels_launched"] + vitrify.counters["externs_called"]
        loss.backward()
        return vitrify.counters["kernels_launched"] + vitrify.counters["externs_called"] - before
    for _ in range(2):
        loss, hidden = both(x)
        assert launched(loss) == launched(alone(x))
    before = launched(both(x)[0])
    loss, hidden = both(x)
    hidden[0].retain_grad()
    assert launched(loss) > before


def test_what_a_call_keeps_goes_with_its_results():
    f = vitrify.compile(two)
    x = R(4, 3, requires_grad=True)
    a, b = f(x)
    del b
    gc.collect()
    a.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_saved_tensor_hooks():
    def program(f, seen, x):
        with torch.autograd.graph.saved_tensors_hooks(vitrify.mark_lossless(lambda t: t.clone()), lambda t: t):
            a, b, c = f(x)
        a.register_hook(lambda g: (seen.append(g.clone()), g * 2)[1])
        c.sum().backward()
    check(chain, program)


def test_a_write_to_a_result_that_another_has_saved():
    def fn(x):
        a = x.exp()
        return a, a.sin()

    def program(f, seen, x):
        a, b = f(x)
        a.detach().add_(1)
        a.register_hook(lambda g: seen.append(1))
        with pytest.raises(RuntimeError, match="modified by an inplace operation.* at version 1; expected version 0"):
            b.sum().backward()
    check(fn, program)


def alone(x):
    return x.exp(),


def beside(x):
    return x.sin(), x.cos(), (x * 2).tanh()


AGAIN = [two, chain, apart, views, of_input, pieces, sliced, alone, beside]
again = pytest.mark.parametrize("fn", AGAIN, ids=lambda f: f.__name__)


@again
@pytest.mark.parametrize("which", [[0], [-1], None], ids=["first", "last", "all"])
def test_hooks_that_gradients_of_gradients_come_to(fn, which):
    """What a derivative has saved is a result, whose hooks see the gradient that comes back through it: they were gone past."""
    def program(f, seen, x):
        outs = f(x)
        for i in range(len(outs)) if which is None else which:
            outs[i].register_hook(lambda g, i=i: (seen.append((i, g.detach().clone())), g * 10)[1])
        first, = torch.autograd.grad(total(outs), x, create_graph=True)
        seen.sort(key=lambda s: s[0])
        first.square().sum().backward()
        seen[:] = sorted(seen, key=lambda s: s[0])
    check(fn, program)


@again
@pytest.mark.parametrize("retained", [False, True])
def test_gradients_of_gradients_up_to_the_results(fn, retained):
    def program(f, seen, x):
        outs = f(x)
        first, = torch.autograd.grad(total(outs), x, create_graph=True)
        if not retained:
            return torch.autograd.grad(first.square().sum(), [*outs, x], allow_unused=True)
        for o in outs:
            o.retain_grad()
        first.square().sum().backward()
        return [o.grad for o in outs]
    check(fn, program)


@again
def test_hooks_of_gradients_of_gradients_of_gradients(fn):
    def program(f, seen, x):
        outs = f(x)
        outs[0].register_hook(lambda g: g * 2)
        first, = torch.autograd.grad(total(outs), x, create_graph=True)
        first.register_hook(lambda g: g * 3)
        second, = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return torch.autograd.grad(second.sum(), [x, first, *outs], allow_unused=True)
    check(fn, program)


def test_a_hook_of_one_result_where_gradients_of_gradients_come_through_another():
    def program(f, seen, x):
        a, b = f(x)
        a.register_hook(lambda g: g * 10)
        first, = torch.autograd.grad(b.sum(), x, create_graph=True)
        first.square().sum().backward()
    check(lambda x: (lambda a: (a, a * x))(x.sin()), program)


def test_a_hook_of_a_result_that_no_gradient_comes_to():
    """One node stood for independent results: its hooks ran for each of them, with None."""
    def program(f, seen, x):
        a, b = f(x)
        a.register_hook(lambda g: (seen.append("a"), g * 10)[1])
        b.register_hook(lambda g: (seen.append("b"), g * 2)[1])
        b.sum().backward(retain_graph=True)
        a.sum().backward(retain_graph=True)
        (a + b).sum().backward()
    check(lambda x: (x.sin(), x.cos()), program)


def test_hooks_of_gradients_of_several_arguments():
    def program(f, seen, x, w):
        firsts = torch.autograd.grad(f(x, w).sum(), [x, w], create_graph=True)
        for i, g in enumerate(firsts):
            g.register_hook(lambda g, i=i: (seen.append(i), g * (i + 2))[1])
        firsts[1].sum().backward(retain_graph=True)
        (firsts[0] + firsts[1]).sum().backward()
    check(lambda x, w: (x * w).sin(), program, lambda: [R(4, requires_grad=True), R(4, requires_grad=True)])


def of_a_leaf_made_inside(x):
    leaf = x.clone().requires_grad_(True)
    a = leaf.unfold(0, 2, 1).mean(-1)
    return a, F.silu(a)


def of_a_leaf_and_another(x):
    leaf = x.clone().requires_grad_(True)
    a = (leaf * 2).sin()
    return a, a.tanh() * x.exp()


@pytest.mark.parametrize("x_needs_grad", [False, True])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("fn", [of_a_leaf_made_inside, of_a_leaf_and_another], ids=lambda f: f.__name__)
def test_of_a_leaf_that_the_program_makes(fn, dynamic, x_needs_grad):
    """The gradients lead to no argument, but a hook on a result in front of others sees them: what they read was not kept."""
    seen = []
    for f in (vitrify.compile(fn, fullgraph=True, dynamic=dynamic), fn):
        for size in (32, 17):
            x, got = torch.linspace(-1, 1, size * 6).view(size, 6).requires_grad_(x_needs_grad), []
            outs = f(x)
            used = outs[0] * 2
            outs[0].register_hook(lambda g, got=got: got.append(g.clone()))
            (outs[0].sum() + (outs[1] * torch.arange(6.)).sum() + used.sin().sum()).backward()
            seen.append([*got, x.grad])
    torch.testing.assert_close(seen[:2], seen[2:])
    assert all(len(s) == 2 for s in seen)


OF_A_VIEW = {
    "sum of both": lambda v, w: ((v + w).sin(), w),
    "of its first": lambda v, w: ((v[:1] + w).sin(), w),
    "a view of the other": lambda v, w: ((v.narrow(0, 0, 1) + w.view(2, 4)[:, :2]).sin(), w.view(2, 4)[:, :2]),
    "twice": lambda v, w: ((v * v + w).cos(), w + v),
}


@pytest.mark.parametrize("how", ["hook", "retained", "both derivatives"])
@pytest.mark.parametrize("made", [lambda x: x.view(-1), lambda x: x.transpose(0, -1), lambda x: x.view(2, 4).t()[:, 0]], ids=["view", "alias", "column"])
@pytest.mark.parametrize("name", OF_A_VIEW)
def test_hooks_of_a_view_that_gives_late(name, made, how):
    """It is made first, and gives to the input last: it began a part of its own, which its gradients went around."""
    def f(x):
        v = made(x)
        s, w = OF_A_VIEW[name](v, x[:v.numel()] * 2 if name in ("sum of both", "twice") else x * 2)
        return v, s, s + w

    def run(f):
        x = torch.linspace(-2, 3, 8, dtype=torch.float64, requires_grad=True)
        out, seen = f(x), []
        weighed = [t * torch.linspace(1, 5, t.numel(), dtype=torch.float64).view(t.shape) for t in out]
        if how == "retained":
            out[0].retain_grad()
        else:
            out[0].register_hook(lambda g: seen.append(g.detach().clone()) or g.clamp(-1, 1))
        loss = sum(t.sum() for t in (*weighed, out[0] * 2))
        grad, = torch.autograd.grad(loss, x, create_graph=how == "both derivatives")
        return [*out, *seen, out[0].grad if how == "retained" else None, grad, *(torch.autograd.grad(grad.square().sum(), x) if how == "both derivatives" else ())]
    for ours, eager in zip(run(vitrify.compile(f)), run(f), strict=True):
        torch.testing.assert_close(ours, eager)
