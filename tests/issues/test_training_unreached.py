"""Gradients through some of the results of a call: the backward does not come to what they do not lead to, and others that run meanwhile, on other threads or in hooks, come there all the same."""
import itertools
import sys
import threading
from pathlib import Path

import pytest
import torch
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from gradients import Stop  # noqa: E402


def leaf(seed):
    return torch.randn(64, generator=torch.Generator().manual_seed(seed)).requires_grad_(True)


def both(x, y):
    return x.sin() * 2, y.cos() * 3


def graph(fn):
    """Two leaves, what follows from them, and what the program makes of that."""
    a, b = leaf(0), leaf(1)
    z = b.exp()
    x, y = a * 2, z * 3
    y.made_of = z
    return a, b, x, y, *fn(x, y)


def run(fn, then):
    a, b, x, y, p, q = graph(fn)
    then(a, b, x, y, p, q, q.sum())
    return a.grad, b.grad


def same(then):
    compiled = vitrify.compile(both, fullgraph=True)
    for _ in range(2):
        for ours, eager in zip(run(compiled, then), run(both, then)):
            assert (ours is None) == (eager is None)
            if eager is not None:
                torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("how", ["hook", "thread", "callback"])
def test_a_backward_within_a_backward(how):
    """The edges to what was not reached were taken off the node while the backward ran: the other lost its gradients, without a word."""
    def then(a, b, x, y, p, q, loss):
        def other():
            loss.backward(retain_graph=True)

        def hook(g):
            if how == "thread":
                t = threading.Thread(target=other)
                t.start()
                t.join()
            elif how == "callback":
                torch.autograd.Variable._execution_engine.queue_callback(other)
            else:
                other()
        x.register_hook(hook)
        p.sum().backward(retain_graph=True)
        loss.backward()
    same(then)


def test_backwards_on_two_threads():
    """Each through a result of its own: one took the edges that the other was to go along ("dependency not found")."""
    def then(a, b, x, y, p, q, loss):
        errors = []

        def many(t):
            try:
                for _ in range(60):
                    t.sum().backward(retain_graph=True)
            except RuntimeError as e:
                errors.append(e)
        threads = [threading.Thread(target=many, args=(t,)) for t in (p, q)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert not errors
    same(then)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("which", ["given", "behind", "leaf"])
def test_what_it_begins_at_as_well(which, first):
    """backward([p, y]) where no gradient of p leads to y: "could not compute gradients for some functions"."""
    def then(a, b, x, y, p, q, loss):
        if which == "leaf":
            b.register_hook(lambda g: g * 2)
        also = {"given": y, "behind": y.made_of, "leaf": b}[which]
        roots = [p, also] if first else [also, p]
        torch.autograd.backward(roots, [torch.ones_like(p)] * 2, retain_graph=True)
        loss.backward()
    same(then)


def test_gradients_of_what_it_begins_at():
    compiled = vitrify.compile(both, fullgraph=True)
    results = []
    for fn in (compiled, both):
        a, b, x, y, p, q = graph(fn)
        results.append(torch.autograd.grad([p, y], [a, b], [torch.ones_like(p)] * 2, allow_unused=True))
    for ours, eager in zip(*results):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("python", [False, True])
def test_nothing_that_is_not_reached_runs(python):
    """No hook of it, no formula of the user's, and nothing there is freed."""
    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t * 2

        @staticmethod
        def backward(ctx, g):
            ran.append("function")
            return g * 2
    compiled = vitrify.compile(both, fullgraph=True)
    for fn in (compiled, both):
        ran = []
        a, b = leaf(0), leaf(1)
        x, y = a * 2, b.exp()
        if python:
            y = Seen.apply(y)
        y.register_hook(lambda g: ran.append("hook"))
        torch.autograd.graph.register_multi_grad_hook([x, b], lambda g: ran.append([t is not None for t in g]))
        p, q = fn(x, y)
        p.sum().backward()
        # A multi-grad hook waits for what would run: the edges say so where nodes of Python are among them, as reentrant checkpoints are.
        assert "hook" not in ran and "function" not in ran and (python or ran == [[True, False]])
        q.sum().backward()
        assert "hook" in ran and b.grad is not None


def test_a_reentrant_checkpoint_beside():
    """It refuses backwards that do not run all nodes, as those of grad()."""
    from torch.utils.checkpoint import checkpoint

    def then(a, b, x, y, p, q, loss):
        p.sum().backward(retain_graph=True)
        loss.backward()

    def run_with(fn):
        a, b = leaf(0), leaf(1)
        p, q = fn(checkpoint(torch.sin, a * 2, use_reentrant=True), b.exp())
        then(a, b, None, None, p, q, q.sum())
        return a.grad, b.grad
    compiled = vitrify.compile(both, fullgraph=True)
    for ours, eager in zip(run_with(compiled), run_with(both)):
        torch.testing.assert_close(ours, eager)


class Materialized(torch.autograd.Function):
    """Cannot be called without a gradient."""
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@pytest.mark.parametrize("asks", ["all", "some", "with h"])
@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("of", ["formula", "function", "function behind"])
def test_what_is_behind_has_gradients_by_another_way(of, ways, asks):
    """Nothing leads to h, and x behind it waits for h alone when the call's node runs: h was run without a gradient."""
    def fn(h, w):
        k = w.exp()
        return k.sin(), h * k
    results, saw = [], []
    for f in (vitrify.compile(fn, fullgraph=True), fn):
        x, y, w, ran = leaf(0), leaf(1), leaf(2), []
        h = x * 2 if ways == 1 else x * y
        h = Materialized.apply(h) if of == "function" else Materialized.apply(h) * 3 if of == "function behind" else h
        h.register_hook(lambda g: ran.append("hook"))
        h.grad_fn.register_prehook(lambda g: ran.append("before"))
        x.register_hook(lambda g: ran.append("x"))
        for _ in range(2):
            a, _ = f(h, w)
            loss = a.sum() + (x * 3).sum() + (y.sin() * 3).sum()
            if asks == "all":
                loss.backward(retain_graph=True)
            elif asks == "some":
                loss.backward(inputs=[x, w], retain_graph=True)
            else:
                ran.append([g is None for g in torch.autograd.grad(loss, [x, h, w], allow_unused=True, retain_graph=True)])
        gradients = [t.grad.clone() for t in (x, y, w) if t.grad is not None]
        f(h, w)[1].sum().backward()  # all edges are back
        results.append([gradients, [t.grad for t in (x, y, w) if t.grad is not None]])
        saw.append(ran)
    torch.testing.assert_close(*results)
    assert saw[0] == saw[1]


def test_what_is_behind_a_reentrant_checkpoint_has_gradients_by_another_way():
    from torch.utils.checkpoint import checkpoint

    def fn(h, w):
        k = w.exp()
        return k.sin(), h * k
    results = []
    for f in (vitrify.compile(fn, fullgraph=True), fn):
        x, w = leaf(0), leaf(1)
        a, _ = f(checkpoint(torch.sin, x * 1, use_reentrant=True), w)
        results.append(torch.autograd.grad(a.sum() + (x * 3).sum(), [x, w]))
    torch.testing.assert_close(*results)


class NoneForTheFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * w

    @staticmethod
    def backward(ctx, g):
        return None, g * 2


def test_what_a_function_gives_no_gradient_to_is_come_to():
    """Eager's backward comes there without one, and runs hooks."""
    ran = []
    for f in (vitrify.compile(lambda x, w: NoneForTheFirst.apply(x * 1, w), fullgraph=True), lambda x, w: NoneForTheFirst.apply(x * 1, w)):
        x, w, seen = leaf(0), leaf(1), []
        used = f(x, w).exp()
        torch.autograd.graph.register_multi_grad_hook([used, x, w], lambda gs: seen.append([g is not None for g in gs]))
        x.register_hook(lambda g: seen.append("x" if g is not None else "x without"))
        used.sum().backward()
        ran.append(seen)
    assert ran[0] == ran[1]


class Averaging(torch.nn.Module):
    """Its second result follows from the first, and from a buffer that may be written since."""

    def __init__(self, writes):
        super().__init__()
        self.writes = writes
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x):
        y = x + 1
        z = y * self.mean
        if self.writes:
            self.mean.mul_(0.9)
        return y, z


def backwards_one_by_one(net, retain):
    net.register_full_backward_hook(lambda *_: None)
    x = torch.linspace(-1, 1, 8).requires_grad_()
    said = []
    for result in net(x):
        try:
            result.sum().backward(retain_graph=retain)
        except RuntimeError as e:
            said.append(str(e))
        said.append(None if x.grad is None else x.grad.tolist())
    return said


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("retain", [False, True])
def test_results_that_a_backward_comes_to_without_a_gradient(writes, retain):
    """The hook of a module leads to all its results: eager unpacks and frees what those without a gradient have saved."""
    assert backwards_one_by_one(vitrify.compile(Averaging(writes), fullgraph=True), retain) == backwards_one_by_one(Averaging(writes), retain)
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["eager_calls"] == 0


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * y

    @staticmethod
    def backward(ctx, g):
        return g, None


def shared(x, w):
    h = (x * w).exp()
    return h * 2, h.sin()


def three(x, w):
    h = (x * w).exp()
    return h.cos(), h.sin(), h


def each_of_its_own(x, w):
    return (x * w).exp(), (x + w).sin()


def one_behind_the_other(x, w):
    a = (x * w).exp()
    return a, a.sin() * w


def all_behind_one(x, w):
    h = x * w
    a = h.exp()
    return a.sin() * w, a, (h * x).cos()


def parts_of_one(x, w):
    a, b = (x * w).exp().split([1, 2])
    return a * 1, b.cos(), a.sin()


def alone(ys, stopped):
    return Stop.apply(stopped).sum()


def beside_another(ys, stopped):
    return Stop.apply(stopped).sum() + ys[-1].sum()


def half_of_two(ys, stopped):
    return Half.apply(ys[0][:1], stopped[:1]).sum()


@pytest.mark.parametrize("written", [None, "w", "result"])
@pytest.mark.parametrize("way", [alone, beside_another, half_of_two], ids=lambda f: f.__name__)
@pytest.mark.parametrize("program", [shared, three, each_of_its_own, one_behind_the_other, all_behind_one, parts_of_one], ids=lambda f: f.__name__)
def test_results_that_share_something_are_come_to_without_a_gradient(program, way, written):
    """Eager unpacks and frees what is behind the one that it comes to, and nothing of the others."""
    def run(f, stopped, then, retain, asked):
        x, w, ran = torch.linspace(0.5, 1, 3, requires_grad=True), torch.linspace(1, 2, 3, requires_grad=True), []
        ys, said = f(x, w), []
        for k, y in enumerate([*ys, x]):
            y.register_hook(lambda g, k=k: ran.append((k, g is None)))
        if written == "w":
            with torch.no_grad():
                w.mul_(2)
        elif written:
            ys[stopped].detach().mul_(2)
        for loss in (way(ys, ys[stopped]), ys[then].sum()):
            try:
                loss.backward(retain_graph=retain, inputs=[x] if asked else None)
            except RuntimeError as e:
                said.append(str(e).partition(" is at ")[2] or str(e))
            said.append([None if t.grad is None else t.grad.clone() for t in (x, w)])
        return said, sorted(ran)

    compiled = vitrify.compile(program, fullgraph=True)
    count = len(program(torch.ones(3), torch.ones(3)))
    for stopped, then, retain, asked in itertools.product(range(count), range(count), [False, True], [False, True]):
        (a, hooks), (b, expected) = run(compiled, stopped, then, retain, asked), run(program, stopped, then, retain, asked)
        assert hooks == expected, (stopped, then, retain, asked)
        torch.testing.assert_close([t for t in a if not isinstance(t, str)], [t for t in b if not isinstance(t, str)])
        assert [t for t in a if isinstance(t, str)] == [t for t in b if isinstance(t, str)], (stopped, then, retain, asked)
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["eager_calls"] == 0
