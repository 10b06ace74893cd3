"""Message passing onto something else than zeros, and counts of something else than ones: no grouped sum by edges stands for it."""
import expects
import pytest
import torch
import vitrify

N, E, D = 6, 20, 4
torch.manual_seed(0)
EDGES = torch.randint(0, N, (2, E))
WEIGHTS = torch.randn(E, 1)


def onto(base, scale=lambda messages: messages):
    return lambda x, e: base(x).scatter_add(0, e[1].view(-1, 1).expand(E, D), scale(x.index_select(0, e[0]))) * 1


def counts(base, of):
    return lambda x, e: base.scatter_add(0, e[1], of(x)).unsqueeze(1) * x


PROGRAMS = {
    "zeros": onto(lambda x: torch.zeros(N, D)),
    "ones": onto(lambda x: torch.ones(N, D)),
    "twos": onto(lambda x: torch.full((N, D), 2.0)),
    "new ones": onto(lambda x: x.new_ones(N, D)),
    "new twos": onto(lambda x: x.new_full((N, D), 2.0)),
    "a value": onto(lambda x: x * 2),
    "weighed, onto ones": onto(lambda x: torch.ones(N, D), lambda messages: messages * WEIGHTS),
    "counts": counts(torch.zeros(N), lambda x: torch.ones(E)),
    "counts of twos": counts(torch.zeros(N), lambda x: torch.full((E,), 2.0)),
    "counts onto ones": counts(torch.ones(N), lambda x: torch.ones(E)),
    "counts of values": counts(torch.zeros(N), lambda x: x.sin().view(-1)[:E]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_added_to(name):
    if name == "zeros":
        expects.compiled("one call adds up by edges")
    f, x = PROGRAMS[name], torch.randn(N, D)
    compiled = vitrify.compile(f)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x, EDGES), f(x, EDGES))
