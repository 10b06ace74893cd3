"""A backward that draws random numbers: the derivative through some of the results, or one that is differentiated again, is taken when the generator may be as it was
when another was. That is no checkpoint that draws again what it drew."""
import warnings

import expects
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


BY_VALUE = {
    "bernoulli": lambda p: torch.bernoulli(p), "bernoulli_": lambda p: torch.empty_like(p).bernoulli_(p), "normal": lambda p: torch.normal(p, 1.0),
    "poisson": lambda p: torch.poisson(p * 9), "multinomial": lambda p: torch.multinomial(p, 8, replacement=True).double(), "gamma": lambda p: torch._standard_gamma(p),
}
BY_SIZE = {
    "rand_like": torch.rand_like, "dropout": lambda p: torch.nn.functional.dropout(torch.ones_like(p)), "normal_": lambda p: (p * 1).normal_(), "geometric_": lambda p: (p * 1).geometric_(.5),
    "of a constant": lambda p: torch.bernoulli(torch.full(p.shape, .5, dtype=p.dtype)), "randperm": lambda p: torch.randperm(8).double(),
}


@pytest.mark.parametrize("name", [*BY_VALUE, *BY_SIZE])
def test_a_checkpoint_draws_once_more(name):
    """Numbers that follow from what was written since were those of the forward, beside the rest of what is written."""
    if name in BY_VALUE:
        expects.eager("draws once more, by what its operands hold then")
        warnings.simplefilter("ignore", vitrify.VitrifyWarning)
    def f(x, w):
        return checkpoint(lambda x, w: {**BY_VALUE, **BY_SIZE}[name]((x * w).sigmoid().detach()) * x * w, x, w, use_reentrant=False)
    compiled = vitrify.compile(f)
    for write in (lambda t: None, lambda t: t.data.neg_()):
        found = []
        for g in (f, compiled):
            torch.manual_seed(0)
            x, w = torch.linspace(-2, 2, 8, dtype=torch.float64, requires_grad=True), torch.full((8,), 1.5, dtype=torch.float64, requires_grad=True)
            h = x * 1
            y = g(h, w)
            write(h)
            y.sum().backward()
            found.append([y.detach(), x.grad, w.grad, torch.get_rng_state()])
        assert all(torch.equal(a, b) for a, b in zip(*found)), found


def inner(use):
    """A leaf that the program makes: its gradient is seen by nobody."""
    def f(x):
        v = x.detach().clone().requires_grad_(True)
        return use(v, x)
    return f


INNER = {
    "rrelu": inner(lambda v, x: (lambda a: (a, torch.atan2(v, v), torch.sinc(a)))(torch.nn.functional.rrelu(v, 0.1, 0.3, training=True))),
    "dropout": inner(lambda v, x: (lambda a: (a, v.sin(), a.exp()))(torch.nn.functional.dropout(v, 0.5))),
    "noise": inner(lambda v, x: (lambda a: (a, v.sin(), a.exp(), x.cos()))(v * torch.rand_like(v))),
    "in a checkpoint": inner(lambda v, x: (lambda a: (a, v.sin(), a.exp() * x))(checkpoint(lambda t: torch.nn.functional.dropout(t.sin(), 0.5).exp(), v, use_reentrant=False))),
}


@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("name", INNER)
def test_a_leaf_that_the_program_makes(name, needs):
    def told(f):
        r = []
        for which in (slice(None), slice(0, 1), slice(1, 2), slice(2, 3)):
            torch.manual_seed(0)
            x = torch.linspace(-1, 1, 33, dtype=torch.float64).requires_grad_(needs)
            out = f(x)
            sum(o.sum() for o in out[which]).backward()
            r += [*(o.detach() for o in out), torch.zeros(33).double() if x.grad is None else x.grad, torch.rand(2)]
        return r
    torch.testing.assert_close(told(vitrify.compile(INNER[name], fullgraph=True)), told(INNER[name]))


Drop = torch.nn.functional.dropout
LATE = {
    "beside a formula that draws": lambda x: (checkpoint(lambda t: Drop(t.sin(), 0.5).exp(), Noise.apply(x), use_reentrant=False), x.exp()),
    "two of them": lambda x: (checkpoint(lambda t: Drop(t.sin(), 0.5).exp(), checkpoint(lambda t: Drop(t.exp(), 0.3).sin(), Noise.apply(x), use_reentrant=False),
                                         use_reentrant=False), x.exp()),
    "one in another": lambda x: (checkpoint(lambda t: checkpoint(lambda s: Drop(s.sin(), 0.5).exp(), Drop(t, 0.2), use_reentrant=False).sin(), Noise.apply(x),
                                            use_reentrant=False), Noise.apply(x.sin())),
    "draws around it": lambda x: (Drop(checkpoint(lambda t: Drop(t.sin(), 0.5).exp(), Drop(Noise.apply(x), 0.4), use_reentrant=False), 0.1), x.exp()),
}


def another_seed():
    torch.manual_seed(9)


def many_draws():  # more than are looked for
    for _ in range(7):
        torch.rand(10_000_000)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("between", [another_seed, many_draws])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LATE)
def test_derivatives_taken_late(name, way, between):
    compiled = vitrify.compile(LATE[name], fullgraph=True)
    results = []
    for f in (LATE[name], compiled):
        torch.manual_seed(0)
        x = torch.linspace(0.5, 2, 6, requires_grad=True)
        a, b = f(x)
        between()
        results.append((*WAYS[way](a, b, x), torch.rand(3)))
    torch.testing.assert_close(*results)


GENERATOR = torch.Generator()
ANEW = {
    "by a generator": lambda x: checkpoint(lambda t: (t * torch.rand(4, generator=GENERATOR)).sin(), x, use_reentrant=False),
    "not put back": lambda x: checkpoint(lambda t: Drop(t.exp(), 0.5).sin(), x, use_reentrant=False, preserve_rng_state=False),
    "in one that is": lambda x: checkpoint(lambda t: checkpoint(lambda s: (s * torch.rand(4, generator=GENERATOR)).sin(), t.exp(), use_reentrant=False), x, use_reentrant=False),
}


@pytest.mark.parametrize("name", ANEW)
def test_a_checkpoint_that_draws_other_numbers_again(name):
    expects.eager("draws other numbers when a checkpoint is computed again")
    expects.no_kernels("eager computes it")
    results = []
    warnings.simplefilter("ignore", vitrify.VitrifyWarning)
    for f in (ANEW[name], vitrify.compile(ANEW[name])):
        torch.manual_seed(0), GENERATOR.manual_seed(0)
        x = torch.linspace(0.5, 2, 4, requires_grad=True)
        y = f(x)
        g, = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        g.square().sum().backward()
        results.append((g.detach(), x.grad, torch.rand(1), torch.rand(1, generator=GENERATOR)))
    torch.testing.assert_close(*results)


@torch.library.custom_op("vt_batched::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(x)


@torch.library.custom_op("vt_batched::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("vt_batched::draws_back", mutates_args=())
def draws_back(x: torch.Tensor) -> torch.Tensor:
    return x * 2


for op, back in ((noise, lambda ctx, g: g), (twice, lambda ctx, g: twice(g)), (draws_back, lambda ctx, g: noise(g))):
    op.register_fake(torch.empty_like)
    op.register_autograd(back)
BATCHED = {"in the backward": lambda x: draws_back(x).sin(), "in a checkpoint": lambda x: checkpoint(lambda t: noise(t).sin(), x, use_reentrant=False),
           "no draws": lambda x: twice(x).sin(), "no draws in a checkpoint": lambda x: checkpoint(lambda t: twice(t).sin(), x, use_reentrant=False)}


@pytest.mark.parametrize("name", BATCHED)
def test_batches_of_custom_ops(name):
    expects.eager("for a batch, for which it may draw")
    warnings.simplefilter("ignore", vitrify.VitrifyWarning)
    results = []
    for f in (BATCHED[name], vitrify.compile(BATCHED[name])):
        torch.manual_seed(0)
        x = torch.linspace(0.5, 2, 4, requires_grad=True)
        y = f(x)
        try:
            got = torch.autograd.grad(y, x, torch.eye(4), is_grads_batched=True)
        except RuntimeError as e:
            assert not name.startswith("no draws")
            got = str(e)
        results.append((got, torch.rand(1).item()))
    assert results[0][1] == results[1][1]
    assert isinstance(results[0][0], str) and results[0][0] == results[1][0] or torch.equal(results[0][0][0], results[1][0][0])


class Formula(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return torch.rand_like(g) * g * ctx.saved_tensors[0].cos()


IN_PART = {
    "aten": lambda x, w: Formula.apply(x) * w, "a custom op": lambda x, w: draws_back(x) * w, "behind others": lambda x, w: Formula.apply(x.exp()).sin() * w,
    "both": lambda x, w: Formula.apply(x) * Formula.apply(w), "two results": lambda x, w: (Formula.apply(x) * w, x * Formula.apply(w.exp())),
    "a checkpoint": lambda x, w: checkpoint(lambda x: draws_back(x).sin(), x, use_reentrant=False) * w,
}
ASKED = {
    "w": lambda y, x, w: torch.autograd.grad(y.sum(), w), "x": lambda y, x, w: torch.autograd.grad(y.sum(), x),
    "both": lambda y, x, w: torch.autograd.grad(y.sum(), (x, w)), "one by one": lambda y, x, w: (*torch.autograd.grad(y.sum(), w, retain_graph=True), *torch.autograd.grad(y.sum(), x)),
    "inputs": lambda y, x, w: (y.backward(torch.ones_like(y), inputs=[w]), w.grad)[1:],
    "again": lambda y, x, w: torch.autograd.grad(torch.autograd.grad(y.sum(), w, create_graph=True)[0].sin().sum(), x),
    "none of the first": lambda y, x, w: torch.autograd.grad(torch.autograd.grad(y.sin().sum(), w, create_graph=True)[0].sin().sum(), w),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", IN_PART)
def test_what_nobody_asks_for_is_not_drawn(name, asked, dynamic):
    compiled = vitrify.compile(IN_PART[name], fullgraph=True, dynamic=dynamic)
    for n in (4, 4, 6):
        results = []
        for f in (compiled, IN_PART[name]):
            torch.manual_seed(n)
            x, w = torch.linspace(0.3, 1, n).requires_grad_(), torch.linspace(1, 2, n).requires_grad_()
            y = f(x, w)
            y = y[0] if isinstance(y, tuple) else y
            results.append([*(g.detach() for g in ASKED[asked](y, x, w)), torch.rand(1)])
        torch.testing.assert_close(*results)
