"""A custom Function of which the program uses some results, or a backward some: what its derivative does with those that are not there is eager's."""
import pytest
import torch
import vitrify
from torch.autograd import grad


class Clip(torch.autograd.Function):
    """Not linear in what comes, which at second order comes by way of both results at once."""

    @staticmethod
    def forward(ctx, x):
        y = x * 2, x * 3
        ctx.save_for_backward(*y)
        return y

    @staticmethod
    def backward(ctx, g, h):
        return (2 * g + 3 * h).clamp(-1, 1) * ctx.saved_tensors[1].square()


class Alone(torch.autograd.Function):
    """A gradient for w only where one result alone has one."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.set_materialize_grads(False)
        return x * w, x * 3

    @staticmethod
    def backward(ctx, g, h):
        return (g if h is None else h) * 5, g if h is None else None


PROGRAMS = {
    "one used": lambda x, w: [(Clip.apply(x)[0] * w).tanh()], "the other used": lambda x, w: [(Clip.apply(x)[1] * w).tanh()],
    "both used": lambda x, w: [(y * w).tanh() for y in Clip.apply(x)], "twice": lambda x, w: [(Clip.apply(Clip.apply(x)[1])[0] * w).tanh()],
    "alone": lambda x, w: list(Alone.apply(x, w)), "behind": lambda x, w: (lambda a, b: [(a * w.detach()).tanh(), b + x])(*Alone.apply(x, w * 1)),
    "between": lambda x, w: (lambda a, b: [a.sin() * w, b])(*Alone.apply(x.exp(), w.sin())),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_orders(name, dynamic):
    f = PROGRAMS[name]
    compiled = vitrify.compile(f, dynamic=dynamic)
    for through in ([0], [-1], [0, -1]):
        seen = []
        for g in (f, compiled):
            x, w = (torch.full((3,), v, dtype=torch.float64, requires_grad=True) for v in (0.2, 0.3))
            results = g(x, w)
            seen.append(list(grad(sum(results[i].sum() for i in through), [x, w], allow_unused=True, retain_graph=True)))
            for _ in range(2):
                now = grad(sum(results[i].sum() for i in through), [x, w], allow_unused=True, create_graph=True)
                seen[-1] += now
                if any(t is not None and t.requires_grad for t in now):
                    seen[-1] += grad(sum(100 * t.sum() for t in now if t is not None and t.requires_grad), [x, w], allow_unused=True, retain_graph=True)
        torch.testing.assert_close(*map(list, ([t if t is not None else torch.zeros(1) for t in s] for s in seen)))
        assert [t is None for t in seen[0]] == [t is None for t in seen[1]]
