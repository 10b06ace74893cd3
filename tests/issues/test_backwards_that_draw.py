"""A backward that draws random numbers: the derivative through some of the results, or one that is differentiated again, is taken when the generator may be as it was
when another was. That is no checkpoint that draws again what it drew."""
import pytest
import torch
import vitrify
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * torch.rand_like(g)


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx, g):
        return g * torch.rand_like(g)


PROGRAMS = {
    "alone": lambda x: (Noise.apply(x), x.sin()),
    "after a draw": lambda x: (Noise.apply(torch.nn.functional.dropout(x, 0.5)), x.sin()),
    "as the program draws": lambda x: (Both.apply(x), x.sin()),
    "in a checkpoint": lambda x: (checkpoint(lambda t: torch.nn.functional.dropout(t.sin(), 0.5).exp(), Noise.apply(x), use_reentrant=False), x.sin()),
    "beside a checkpoint": lambda x: (Noise.apply(checkpoint(lambda t: torch.nn.functional.dropout(t.sin(), 0.5).exp(), x, use_reentrant=False)), x.sin()),
}
WAYS = {
    "one result": lambda a, b, x: torch.autograd.grad(a.sum(), x),
    "all": lambda a, b, x: torch.autograd.grad(a.sum() + b.sum(), x),
    "again": lambda a, b, x: torch.autograd.grad(torch.autograd.grad((a.sin() + b).sum(), x, create_graph=True)[0].sin().sum(), x),
    "one, then all": lambda a, b, x: (*torch.autograd.grad(a.sum(), x, retain_graph=True), *torch.autograd.grad(a.sum() + b.sum(), x)),
}


@pytest.mark.parametrize("reseed", [False, True], ids=["", "seeded before the backward"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call(name, way, reseed):
    compiled = vitrify.compile(PROGRAMS[name], fullgraph=True)
    for seed in (0, 0, 1):
        results = []
        for f in (PROGRAMS[name], compiled):
            torch.manual_seed(seed)
            x = torch.ones(5, requires_grad=True)
            a, b = f(x)
            if reseed:
                torch.manual_seed(seed)
            results.append([*WAYS[way](a, b, x), torch.rand(2)])
        torch.testing.assert_close(results[1], results[0])


AGAIN = {
    "in a checkpoint": lambda x: checkpoint(lambda t: torch.dropout(t.sin(), 0.5, True).exp(), Noise.apply(x), use_reentrant=False),
    "before a result that is saved": lambda x: torch.dropout(Noise.apply(x).sin(), 0.5, True).exp(),
    "twice": lambda x: Noise.apply(Noise.apply(x).sin()).exp(),
    "in two ways": lambda x: (lambda n: n.sin() * n.exp())(Noise.apply(x)),
    "saves its result": lambda x: Noise.apply(x.exp()).exp(),
}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("program", AGAIN)
def test_gradients_of_gradients_that_come_there_in_two_ways(program, hooked):
    """Back through the result, which what follows has saved, and back from its derivative: in eager they meet before anything is drawn."""
    results = []
    for f in (vitrify.compile(AGAIN[program], fullgraph=True), AGAIN[program]):
        for _ in range(2):
            torch.manual_seed(0)
            x = torch.full((50,), 0.3, dtype=torch.float64, requires_grad=True)
            y = f(x)
            if hooked:
                y.register_hook(lambda g: g * 2)
            first, = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
            second, = torch.autograd.grad(first.sin().sum(), x, create_graph=True)
            results.append([y.detach(), first.detach(), second.detach(), *torch.autograd.grad(second.sum() + y.sum(), x), torch.rand(2)])
    torch.testing.assert_close(results[:2], results[2:])
