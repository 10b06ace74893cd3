"""A compiled function inside an eager checkpoint that is not reentrant: torch ends the recomputation with the last tensor that was saved, and what a program writes behind that is written once."""
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import expects

ONCE = "hooks take what it saves before it has written, or drawn, all"


def counted(x, w, b):
    y = (x @ w).sin()
    with torch.no_grad():
        b.add_(1)
    return y * 2


def copied(x, w, b):
    y = (x @ w).sin()
    b.copy_(torch.rand(3, dtype=b.dtype))
    return y * 2


def averaged(x, w, b):
    y = x @ w
    with torch.no_grad():
        b.lerp_(y.detach().mean(0), 0.1)
    return y + 1


def in_place(x, w, b):
    y = (x @ w).exp()
    b.view(1, 3)[:, 1:].mul_(2)
    return y


def counted_before(x, w, b):
    with torch.no_grad():
        b.add_(1)
    return (x @ w).sin()


def result_saved(x, w, b):
    y = x @ w
    with torch.no_grad():
        b.add_(y.detach().mean(0))
    return y.exp()


def normalized(x, w, b):
    return F.batch_norm(x @ w, b, b + 1, training=True)


def nothing_saved(x, w, b):
    with torch.no_grad():
        b.add_(1)
    return x * 2


LATE, EARLY = [counted, copied, averaged, in_place], [counted_before, result_saved, normalized, nothing_saved]


def steps(f, around):
    torch.manual_seed(0)
    x, w, b = (torch.randn(3, *s, dtype=torch.float64) for s in ((3,), (3,), ()))
    x.requires_grad_(), w.requires_grad_()
    seen = []
    for _ in range(3):
        around(f, x, w, b).sum().backward()
        seen += [b.clone(), b._version, x.grad.clone()]
    return [*seen, torch.rand(2)]


def last(f, x, w, b):
    return checkpoint(lambda x, w: f(x.exp(), w, b), x, w, use_reentrant=False)


def before_others(f, x, w, b):
    return checkpoint(lambda x, w: f(x.exp(), w, b).cos(), x, w, use_reentrant=False)


def to_the_end(f, x, w, b):
    with set_checkpoint_early_stop(False):
        return last(f, x, w, b)


@pytest.mark.parametrize("around", [last, before_others, to_the_end], ids=lambda f: f.__name__)
@pytest.mark.parametrize("fn", LATE + EARLY, ids=lambda f: f.__name__)
def test_writes(fn, around):
    if fn in LATE:
        expects.eager(ONCE)
        expects.eager("a checkpoint's function is called again, and ran eagerly the first time", some=True)
    if fn is nothing_saved:
        expects.compiled("it may have nothing to compute")
    torch.testing.assert_close(steps(vitrify.compile(fn, fullgraph=True), around), steps(fn, around))


GENERATOR = torch.Generator()
DRAWS = {
    "by a generator": (lambda x: x.sin() + torch.rand(4, generator=GENERATOR), True), "not put back": (lambda x: x.sin() + torch.rand(4), False),
    "in a checkpoint": (lambda x: checkpoint(lambda t: (t * torch.rand(4, generator=GENERATOR)).sin(), x, use_reentrant=False), True),
    "places": (lambda x: x.exp()[torch.randperm(4, generator=GENERATOR)], True),
    "a mask that nothing saves": (lambda x: x.sin() + torch.bernoulli(torch.full((4,), 0.5), generator=GENERATOR), False),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_behind_what_is_saved(name):
    f, preserve = DRAWS[name]
    expects.eager("hooks take what it saves before it has written, or drawn, all", "draws other numbers", "ran eagerly the first time", some=True)
    expects.no_kernels("eager computes it")
    results = []
    for g in (f, vitrify.compile(f)):
        for _ in range(2):
            torch.manual_seed(0), GENERATOR.manual_seed(0)
            x = torch.linspace(0.5, 2, 4, requires_grad=True)
            checkpoint(g, x, use_reentrant=False, preserve_rng_state=preserve).sum().backward()
            results.append((x.grad, torch.rand(1), torch.rand(1, generator=GENERATOR)))
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[3])


def test_dropout_in_a_checkpoint_around():
    compiled = vitrify.compile(lambda x: x + torch.nn.functional.dropout((x * 2).tanh(), 0.5), fullgraph=True)
    for preserve in (True, False):
        results = []
        for g in (compiled, lambda x: x + torch.nn.functional.dropout((x * 2).tanh(), 0.5)):
            torch.manual_seed(0)
            x = torch.linspace(0.5, 2, 40, requires_grad=True)
            checkpoint(g, x, use_reentrant=False, preserve_rng_state=preserve).sum().backward()
            results.append((x.grad, torch.rand(1)))
        torch.testing.assert_close(*results)
