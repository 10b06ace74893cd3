"""A backward that asks for what a result does not lead to runs none of eager's nodes in front of it: they drew, kept gradients, called hooks and freed
what they had saved, where other results of the call, or gradients that nobody had asked for, lead there."""
import pytest
import torch

import vitrify


class Draws(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * torch.rand(2)


def shared(x, y):
    h = y.sin()
    return x * h, h.exp()


def shared_twice(x, y):
    h = y.sin()
    k = h * 2
    return x * h + k, h.exp(), k.cos()


def apart(x, y):
    return x * y, y.sin()


def by_turns(x, y):
    a, b = y * 3, y.exp()
    return a * x + y.cos(), b


def behind_another(x, y):
    h = y.sin()
    k = h.relu() * x
    return (k * h)[None].mean(0), h * 2


def at_a_view(x, y):
    v = y.sin().expand(2, 2)
    return (v * x).sum(0), v.exp().sum(0), v


def at_one_of_many(x, y):
    a, b, c = torch.stack([y, y * 2, y * 3]).unbind(0)
    return (a * x).exp(), (a * b).sin(), c


RESULTS = {"meet in the program": shared, "meet twice": shared_twice, "meet at an input": apart, "give by turns": by_turns, "behind another": behind_another,
           "meet at a view": at_a_view, "meet at one of many": at_one_of_many}
GRADIENTS = {"product": lambda h, y: y * h, "of an intermediate": lambda h, y: y.sin() * h, "matrices": lambda h, y: (h[None] @ y[:, None]).sum(-1)}


def leaves():
    return [torch.full((2,), v, requires_grad=True) for v in (0.7, 0.3)]


def of_a_result(f):
    """What is in front of the second result, and what a backward that does not lead there has left of it."""
    x, y = leaves()
    b = f(x, y)[1]
    return b, x, y


def of_a_gradient(f):
    x, y = leaves()
    g, = torch.autograd.grad(f(x * 1, y).sum(), x, create_graph=True)
    return g, x, y


CASES = [pytest.param(of_a_result, f, id=n) for n, f in RESULTS.items()] + [pytest.param(of_a_gradient, f, id=n) for n, f in GRADIENTS.items()]


def both(run, make, f):
    """Twice compiled: the second call finds what the first has made."""
    compiled = vitrify.compile(f)
    expected = run(make, f)
    for _ in range(2):
        assert run(make, compiled) == expected
    return expected


@pytest.mark.parametrize("make, f", CASES)
def test_nothing_is_kept_or_called(make, f):
    def run(make, f):
        of, x, y = make(f)
        ran = []
        front = of.exp()
        front.retain_grad()
        of.register_hook(lambda g: ran.append(g.tolist()))
        nothing = torch.autograd.grad(front.sum(), x, allow_unused=True, retain_graph=True)
        kept = front.grad
        (front.sum() + x.sum()).backward(inputs=[x], retain_graph=True)
        mixed = front.grad, x.grad.tolist(), y.grad, list(ran)
        front.sum().backward(inputs=[y])
        return nothing, kept, mixed, front.grad.tolist(), [round(v, 3) for v in y.grad.tolist()], [[round(v, 3) for v in g] for g in ran]

    assert both(run, make, f)[:2] == ((None,), None)


@pytest.mark.parametrize("make, f", CASES)
def test_nothing_is_freed(make, f):
    def run(make, f):
        of, x, y = make(f)
        loss = of.exp().sum()
        nothing = torch.autograd.grad(loss, x, allow_unused=True)
        gradient, = torch.autograd.grad(loss, y)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, y)
        return nothing, [round(v, 3) for v in gradient.tolist()]

    both(run, make, f)


@pytest.mark.parametrize("make, f", CASES)
def test_nothing_is_drawn(make, f):
    def run(make, f):
        torch.manual_seed(0)
        of, x, y = make(f)
        gradient, = torch.autograd.grad(Draws.apply(of).sum() + x.square().sum(), x)
        return gradient.tolist(), torch.rand(1).item()

    both(run, make, f)


@pytest.mark.parametrize("make, f", CASES)
def test_what_was_written_in_front_does_not_matter(make, f):
    def run(make, f):
        of, x, y = make(f)
        factor = torch.full((2,), 3.0)
        loss = (of * factor).sum()
        factor.add_(1)
        nothing = torch.autograd.grad(loss, x, allow_unused=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, y)
        return nothing

    both(run, make, f)


def test_a_penalty_whose_gradients_are_asked_for_in_turn():
    def run(make, f):
        torch.manual_seed(0)
        embed = torch.nn.Linear(3, 3)
        w = torch.randn(3, 3, requires_grad=True)
        x = torch.randn(2, 3, requires_grad=True)
        g, = torch.autograd.grad(f(embed(x), w).sum(), x, create_graph=True)
        penalty = g.square().sum()
        penalty.backward(inputs=[x, embed.bias])
        penalty.backward(inputs=[w, embed.weight])
        return [None if t.grad is None else round(t.grad.sum().item(), 4) for t in (x, embed.bias, w, embed.weight)]

    assert both(run, None, lambda h, w: (h @ w).sum(-1))[:2] == [None, None]


def test_many_ways_to_ask_for_gradients():
    """More than there are programs kept for."""
    def f(*xs):
        return sum((x * xs[i - 1].sin()).sum() for i, x in enumerate(xs))

    compiled = vitrify.compile(f)
    for asked in range(1, 2**6):
        got = []
        for call in (f, compiled):
            xs = [torch.full((2,), 0.1 * i, requires_grad=True) for i in range(1, 7)]
            inputs = [x for i, x in enumerate(xs) if asked >> i & 1]
            first = torch.autograd.grad(call(*xs), inputs, create_graph=True)
            front = first[0].exp()
            front.retain_grad()
            second = torch.autograd.grad(front.sum() + sum(x.sum() for x in xs), xs)
            got.append([*first, *second, front.grad])
        for eager, ours in zip(*got):
            assert (eager is None) == (ours is None)
            if eager is not None:
                torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("zeroed", [False, True], ids=["plain", "zeroed"])
def test_what_lies_on_no_way_to_it_may_be_changed(zeroed, dynamic):
    """The last result's gradient passes by what index_add_ has saved, which only the other argument's reads; nodes of other results lie between."""
    def f(x, y):
        moved = x.clone().index_add_(1, torch.tensor([0, 2]), x[:, :2])
        product = x * y
        v = (y + moved) * 1
        if zeroed:
            v.t()[0].zero_()
        return product.exp(), v[:, ::2], v.sum()

    def run(f):
        torch.manual_seed(0)
        x, y = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
        results = f(x, y)
        with torch.no_grad():
            x.mul_(0.9)
        gradient, = torch.autograd.grad(results[2], y, retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(results[2], x)
        return gradient.tolist()

    compiled = vitrify.compile(f, dynamic=True) if dynamic else vitrify.compile(f)
    for _ in range(2):
        assert run(compiled) == run(f)
