"""fork_rng() in a checkpoint's function: what puts the generator back was taken for the checkpoint's own, and all random numbers after the call were others."""
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch.utils.checkpoint import checkpoint


def forked(q):
    with torch.random.fork_rng():
        return F.dropout(q)


def seeded(q):
    state = torch.get_rng_state()
    r = q * torch.rand(3)
    torch.set_rng_state(state)
    return r


PROGRAMS = {"fork": lambda x: checkpoint(forked, x, use_reentrant=False), "behind": lambda x: checkpoint(lambda q: forked(q.sin()), x * 2, use_reentrant=False) * 2, "nested": lambda x: checkpoint(lambda q: checkpoint(forked, q, use_reentrant=False), x, use_reentrant=False), "state": lambda x: checkpoint(seeded, x, use_reentrant=False)}


def told(f):
    seen = []
    for k in range(3):
        torch.manual_seed(k)
        x = torch.full((3,), 1.0 + k, requires_grad=True)
        y = f(x)
        seen += [y.tolist(), torch.rand(1).item()]
        y.sum().backward()
        seen += [x.grad.tolist(), torch.rand(1).item()]
    return [round(v, 5) for part in seen for v in (part if isinstance(part, list) else [part])]


@pytest.mark.eager("sets the state of a random number generator")
@pytest.mark.parametrize("name", PROGRAMS)
def test_put_back(name):
    assert told(vitrify.compile(PROGRAMS[name])) == told(PROGRAMS[name])


def test_a_checkpoint_that_draws():
    f = lambda x: checkpoint(lambda q: F.dropout(q.sin()), x, use_reentrant=False) * 2  # noqa: E731
    assert told(vitrify.compile(f, fullgraph=True)) == told(f)
