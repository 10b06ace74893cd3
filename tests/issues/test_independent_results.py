"""Results of one call that have nothing to do with one another each have an autograd node of their own, as in eager: what is done with one's node, or by its number there, is nothing to the others."""
import itertools

import pytest
import torch
import torch.nn.functional as F
import vitrify


def leaf(seed):
    return torch.randn(3, generator=torch.Generator().manual_seed(seed)).requires_grad_(True)


def apart(x, w):
    return x * 2, w * 2


def at_one_leaf(x, w):
    return x.sin(), x.exp() * w


def several(x, w):
    h = x.exp()
    return h * 2, w * 2, h.sin(), (w * 3).cos(), torch.cat([x, w])


def with_a_chain(x, w):
    a = x * 2
    return a, w.exp(), a * 3, w * 3


def written(x, w):
    x.mul_(2)
    return w.exp(), x * 3


def with_views(x, w):
    a, b = x * 2, w * 2
    return a.view(3, 1), b, a[1:], b[:2]


FUNCTIONS = [apart, at_one_leaf, several, with_a_chain, written, with_views]


def both(program, fn, **options):
    results = []
    for f in (vitrify.compile(fn, fullgraph=True, **options), fn):
        x, w = leaf(0), leaf(1)
        x = x * 1 if fn is written else x
        try:
            results.append(program(f, x, w))
        except RuntimeError as e:
            results.append(str(e).partition(":")[0])
    compare(*results)


def compare(a, b):
    assert type(a) is type(b)
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            compare(x, y)
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b)
    else:
        assert a == b


def weighed(results):
    return sum((r * (2 * i + 5)).sum() for i, r in enumerate(results))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradients_of_all_and_of_each(fn, dynamic):
    def program(f, x, w):
        seen = []
        for _ in range(2):
            results = f(x, w) if fn is not written else f(x.clone(), w)
            seen.append(torch.autograd.grad(weighed(results), [x, w], retain_graph=True))
            for r in results:
                seen.append(torch.autograd.grad(r.exp().sum(), [x, w], retain_graph=True, allow_unused=True))
                first = [g for g in torch.autograd.grad(r.exp().sum(), [x, w], create_graph=True, allow_unused=True) if g is not None]
                seen.append(torch.autograd.grad(weighed(first), [x, w], retain_graph=True, allow_unused=True))
        return seen
    both(program, fn, dynamic=dynamic)


@pytest.mark.parametrize("kept", [[0], [1], [0, 1]])
@pytest.mark.parametrize("fn", [apart, at_one_leaf, with_a_chain], ids=lambda f: f.__name__)
def test_gradients_kept_of_what_is_written(fn, kept):
    """Torch moves what is to be kept of output 0 of the old node: others' gradients were kept in its place, or the assertion failed that there is any."""
    def program(f, x, w):
        results = f(x, w)
        for k in kept:
            results[k].retain_grad()
        results[1].mul_(3)
        weighed(results).backward()
        return [results[k].grad for k in kept], x.grad, w.grad
    both(program, fn)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("fn", [apart, at_one_leaf, with_a_chain], ids=lambda f: f.__name__)
def test_hooks_of_a_node(fn, before):
    def program(f, x, w):
        results = f(x, w)
        if before:
            results[1].grad_fn.register_prehook(lambda g: tuple(t * 10 for t in g))
        else:
            results[1].grad_fn.register_hook(lambda g, given: tuple(t if t is None else t * 10 for t in g))
        weighed(results).backward()
        return x.grad, w.grad
    both(program, fn)


@pytest.mark.parametrize("front", ["freed", "written", "checkpoint", "hook"])
def test_what_stands_in_front_of_another(front):
    """It leads to nothing that is asked for."""
    from torch.utils.checkpoint import checkpoint

    def program(f, x, w):
        a, b = f(x, w)
        ran = []
        if front == "checkpoint":
            loss = checkpoint(torch.exp, b, use_reentrant=True).sum()
        else:
            t = b.exp()
            loss = t.sum() if front != "written" else (t * t).sum()
            if front == "written":
                with torch.no_grad():
                    t.add_(1)
            t.register_hook(lambda g: ran.append("hook"))
        if front == "freed":
            loss.backward()
        got = torch.autograd.grad(loss + a.sum() if front != "freed" else loss, x, allow_unused=True)
        return got, len(ran)
    both(program, apart)


def test_order_of_hooks():
    def program(f, x, w):
        ran = []
        for i, r in enumerate(f(x, w)):
            r.register_hook(lambda g, i=i: ran.append(i))
            last = r if i == 0 else torch.cat([last.reshape(-1), r.reshape(-1)])
        last.sum().backward()
        return ran
    for fn in (apart, at_one_leaf, with_a_chain):
        both(program, fn)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_what_a_backward_frees(fn):
    def program(f, x, w):
        results, said = f(x, w), []
        for r in [*results, *results]:
            try:
                r.exp().sum().backward()
                said.append(None)
            except RuntimeError as e:
                said.append(str(e)[:40])
        return said, w.grad
    both(program, fn)


class NoneForTheFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * w

    @staticmethod
    def backward(ctx, g):
        return None, g * 2


@pytest.mark.parametrize("fn", [lambda x, w: (w.sin(), x * w), lambda x, w: (NoneForTheFirst.apply(x * 1, w), w.exp()), lambda x, w: (NoneForTheFirst.apply(x, w), x * w)],
                         ids=["apart", "a function that gives none", "behind both"])
@pytest.mark.parametrize("which", [0, 1])
def test_hooks_of_several(fn, which):
    """They wait for those that the backward is to come to: with a gradient, or without one, as where a user's function gives none."""
    ran = []
    for f in (vitrify.compile(fn, fullgraph=True), fn):
        x, w, seen = leaf(0), leaf(1), []
        used = f(x, w)[which].exp()
        torch.autograd.graph.register_multi_grad_hook([used, x, w], lambda gs: seen.append([g is not None for g in gs]))
        x.register_hook(lambda g: seen.append("x" if g is not None else "x without"))
        used.sum().backward()
        ran.append(seen)
    assert ran[0] == ran[1]


def test_a_hook_of_a_result_that_no_gradient_comes_to():
    def program(f, x, w):
        a, b = f(x, w)
        a.register_hook(lambda g: g * 10)
        b.sum().backward()
        return x.grad
    both(program, lambda x, w: (x.sin(), x.cos()))


@pytest.mark.parametrize("through", ["all", "first", "last"])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_gradients_of_gradients_beside_those_of_results(fn, through):
    """One backward comes to nodes of the derivative and to those of the program: what the first have freed the others may still read."""
    def program(f, x, w):
        seen = []
        for then in ("alone", "all", "first", "last"):
            results = f(x.clone() if fn is written else x, w)
            of = {"all": results, "first": results[:1], "last": results[-1:]}
            firsts = torch.autograd.grad(weighed([r * r for r in of[through]]), [x, w], create_graph=True, allow_unused=True)
            loss = weighed([g * g for g in firsts if g is not None]) + (0 if then == "alone" else weighed(of[then]))
            seen.append(torch.autograd.grad(loss, [x, w], allow_unused=True))
        return seen
    both(program, fn)


def behind_one(x):
    h = x * 0.25
    return h, h.cos(), h.t() * 3


def rotated(x):
    v = torch.rot90(x, 1, (0, 1))
    w = v.mT
    return F.glu(w.repeat_interleave(2, 0), 0), x.double(), v, w


RESULTS = {"large": lambda x: (x * 1e8,), "one behind another": lambda x: (lambda h: (h * 2, h))(x.sin()), "large and negative": lambda x: (x * -1e8,), "several behind one": behind_one, "rotated": rotated}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("order", [o for o in itertools.permutations(RESULTS, 4) if "several behind one" in o and "rotated" in o], ids=str)
def test_gradients_are_added_in_eagers_order(order, back):
    """It shows in what rounding leaves, and in the strides of dims of one element: nodes of results behind others came last, and what had come to one was added anew."""
    def fn(x):
        out = [t for name in order for t in RESULTS[name](x)]
        return out[::-1] if back else out
    results = []
    for f in (vitrify.compile(fn, fullgraph=True), fn):
        x = torch.linspace(0.5, 1, 5).view(1, 5).requires_grad_()
        sum(t.sum() for t in f(x)).backward()
        results.append((x.grad, x.grad.stride()))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


BY_TURNS = {
    "between": lambda x: (v := x.clone(), x.sin(), v @ v.mT)[1:],
    "twice": lambda x: (a := x * 2, b := x.cos(), a.exp() * x, b @ b)[2:],
    "three": lambda x: (a := x * 2, b := x.t() * 3, c := x.sin(), c.exp(), a.cos(), b @ b)[3:],
}


@pytest.mark.parametrize("tangent", [lambda s: torch.ones(s), lambda s: torch.ones(s[::-1]).t()], ids=["", "swapped"])
@pytest.mark.parametrize("which", [None, 0, 1], ids=["all", "first", "second"])
@pytest.mark.parametrize("name", BY_TURNS)
def test_gradients_of_one_input_that_come_by_turns(name, which, tangent):
    """Each result gave all of its own at once."""
    results = []
    for f in (vitrify.compile(BY_TURNS[name], fullgraph=True), BY_TURNS[name]):
        x = torch.linspace(-1, 1, 9).view(3, 3).t().requires_grad_()
        out = f(x)
        if which is not None:
            torch.autograd.backward(out[which], tangent(out[which].shape))
            rest = [t for k, t in enumerate(out) if k != which]
            out, x.grad = rest, None
        g, = torch.autograd.grad(out, x, [tangent(t.shape) for t in out])
        results.append(g)
    torch.testing.assert_close(*results)
    assert results[0].stride() == results[1].stride()


class SaysWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * 2


WHATEVER_COMES = {
    "zeros": lambda x: (lambda c: (c.sin(), torch.poisson(c.abs())))(x.clone()),
    "zeros of more": lambda x: (lambda c: (torch.clamp(c, min=c), torch.poisson(c[-2:].exp())))(x.clone()),
    "a Function's": lambda x: (lambda c: (c.sin(), SaysWhatItSaved.apply(c)))(x.clone()),
    "Functions behind one": lambda x: (lambda c: (SaysWhatItSaved.apply(c), SaysWhatItSaved.apply(c.exp())))(x + 1),
    "all saved": lambda x: (lambda c: (c.sin(), SaysWhatItSaved.apply(c)))(x.exp()),
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "last"])
@pytest.mark.parametrize("name", WHATEVER_COMES)
def test_formulas_that_give_the_same_whatever_comes_to_them(name, order):
    """What they gave was taken to be saved by the node that it came to, which so could not run for both results."""
    results = []
    for f in (vitrify.compile(WHATEVER_COMES[name]), WHATEVER_COMES[name]):
        torch.manual_seed(0)
        x = leaf(3)
        out, raised = f(x), []
        for k in order:
            try:
                out[k].sum().backward()
            except RuntimeError as e:
                raised.append((k, str(e)))
        results.append((x.grad, raised))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
