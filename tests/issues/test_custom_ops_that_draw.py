"""Custom ops draw what a capture does not see: whatever takes the generator back takes them back. Generators that a program is given no checkpoint takes back."""
import pytest
import torch
import torch.nn.functional as F
import vitrify
from expects import eager, no_kernels
from torch.utils.checkpoint import checkpoint


@torch.library.custom_op("custom_ops_that_draw::noise", mutates_args=())
def noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("custom_ops_that_draw::drop", mutates_args=())
def drop(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mask = (torch.rand_like(x) > 0.5).to(x.dtype)
    return x * mask, mask


@torch.library.custom_op("custom_ops_that_draw::fill", mutates_args=["out"])
def fill(out: torch.Tensor) -> None:
    out.copy_(torch.rand_like(out))


@torch.library.custom_op("custom_ops_that_draw::nothing", mutates_args=())
def nothing(x: torch.Tensor) -> torch.Tensor:
    return x * 2


noise.register_fake(torch.empty_like)
noise.register_autograd(lambda ctx, g: g)
drop.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
drop.register_autograd(lambda ctx, g, _: g * ctx.saved_tensors[0], setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]))
nothing.register_fake(torch.empty_like)
nothing.register_autograd(lambda ctx, g: nothing(g))

G = torch.Generator()


def filled(x):
    out = torch.zeros_like(x)
    fill(out)
    return x * out


def ckpt(f, **how):
    return lambda x: checkpoint(f, x, use_reentrant=False, **how)


BODIES = {
    "noise": lambda x: noise(x).sin(),
    "a mask": lambda x: drop(x.exp())[0],
    "two": lambda x: noise(noise(x).sin()).cos(),
    "in front of dropout": lambda x: F.dropout(noise(x).sin(), 0.5).sin(),
    "behind dropout": lambda x: noise(F.dropout(x, 0.5)).sin(),
    "between draws": lambda x: (noise(torch.rand_like(x) * x) * torch.rand_like(x)).sin(),
    "a write": lambda x: filled(x).sin(),
    "no draw": lambda x: nothing(x).sin() * torch.rand_like(x),
    "a generator": lambda x: x.sin() * torch.rand(4, generator=G),
    "a generator and an op": lambda x: noise(x.sin() * torch.rand(4, generator=G)).sin() * torch.rand(4),
    "a generator's mask": lambda x: (x.sin() * torch.empty(4).bernoulli_(0.5, generator=G)).exp(),
    "two of a generator's": lambda x: (x * torch.rand(4, generator=G)).sin() * torch.randn(4, generator=G),
}
PLACES = {
    "alone": lambda f: ckpt(f),
    "after another": lambda f: lambda x: ckpt(f)(noise(x)),
    "before another": lambda f: lambda x: noise(ckpt(f)(x)),
    "twice": lambda f: lambda x: ckpt(f)(ckpt(f)(x)),
    "nested": lambda f: ckpt(lambda x: ckpt(f)(noise(x))),
    "as it goes on": lambda f: ckpt(f, preserve_rng_state=False),
    "of one of two results": lambda f: lambda x: (ckpt(f)(x), noise(x).exp()),
}


def gradients(f, way):
    torch.manual_seed(0), G.manual_seed(0)
    told = []
    for n in range(2):
        x = torch.linspace(0.5, 2, 4).requires_grad_()
        out = f(x)
        out = out if isinstance(out, tuple) else (out,)
        if way == "again":
            g, = torch.autograd.grad(out[0].sum(), x, create_graph=True)
            (g.sin() * x).sum().backward()
        elif way == "kept":
            out[0].sum().backward(retain_graph=True)
            sum(o.sum() for o in out).backward()
        else:
            torch.rand(n)
            sum(o.sum() for o in out).backward()
        told += [*(o.detach() for o in out), x.grad, torch.rand(1), torch.rand(1, generator=G)]
    return told


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", ["once", "kept"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("body", BODIES)
def test_checkpoints(body, place, way):
    f = PLACES[place](BODIES[body])
    draws_others = place == "as it goes on" or "generator" in body
    if draws_others:
        eager("draws other numbers when a checkpoint is computed again")
        no_kernels("eager computes it")
    same(gradients(vitrify.compile(f, fullgraph=not draws_others), way), gradients(f, way))


@pytest.mark.parametrize("body", BODIES)
def test_a_checkpoint_is_differentiated_twice(body):
    f = ckpt(BODIES[body])
    draws_others = "generator" in body
    if draws_others:
        eager("draws other numbers when a checkpoint is computed again")
        no_kernels("eager computes it")
    same(gradients(vitrify.compile(f, fullgraph=not draws_others), "again"), gradients(f, "again"))


def forked(x):
    with torch.random.fork_rng():
        y = noise(x)
    return (y * 2).sin() + torch.rand(4)


def forked_at_the_end(x):
    with torch.random.fork_rng():
        y = noise(x)
    return (y * 2).sin()


def set_back(x):
    state = torch.get_rng_state()
    y = noise(x)
    torch.set_rng_state(state)
    return y * 2 + noise(x)


def set_back_for_dropout(x):
    state = torch.get_rng_state()
    y = noise(x)
    torch.set_rng_state(state)
    return F.dropout(y)


@pytest.mark.parametrize("f", [forked, forked_at_the_end, set_back, set_back_for_dropout])
def test_a_program_that_takes_the_generator_back(f):
    want = gradients(f, "once")
    eager("sets the state of a random number generator")
    same(gradients(vitrify.compile(f), "once"), want)


def drops_alike(x):
    state = torch.get_rng_state()
    a = F.dropout(x, 0.5)
    torch.set_rng_state(state)
    return a * F.dropout(x, 0.5)


def test_what_is_refused_is_refused_in_a_backward_too():
    """An eager checkpoint computes it again there."""
    want = gradients(ckpt(drops_alike), "once")
    eager("sets the state of a random number generator", "ran eagerly the first time")
    same(gradients(ckpt(vitrify.compile(drops_alike)), "once"), want)


def test_one_that_raises_where_it_is_computed_again():
    """The generator stayed where the forward had been."""
    raises = []

    @torch.library.custom_op("vt_draw::raises", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        if raises:
            raise ValueError("boom")
        return x + torch.rand(4)
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, g: g)
    f = ckpt(lambda x: op(x.sin()).exp())
    told = []
    for g in (vitrify.compile(f), f):
        raises.clear()
        x = torch.linspace(0.5, 2, 4).requires_grad_()
        torch.manual_seed(5)
        y = g(x)
        torch.rand(2)
        raises.append(True)
        with pytest.raises(ValueError, match="boom"):
            y.sum().backward()
        told.append(torch.rand(3))
    assert torch.equal(*told)
