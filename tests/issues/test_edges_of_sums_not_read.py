"""Edges out of range raise also where nobody reads the sum over them: grouped once per list, they were not looked at then."""
import expects
import pytest
import torch

import vitrify


def summed(x, edges, weights=None):
    messages = x.index_select(0, edges[0])
    if weights is not None:
        messages = messages * weights
    return torch.zeros_like(x).scatter_add(0, edges[1].unsqueeze(-1).expand_as(messages), messages)


def caught(x, edges):
    try:
        summed(x, edges)
    except (IndexError, RuntimeError):
        return x * 0
    return x + 1


def after_a_write(x, edges):
    messages = x.index_select(0, edges[0])
    x.add_(1)
    torch.zeros_like(x).scatter_add(0, edges[1].unsqueeze(-1).expand_as(messages), messages)
    return x * 1


PROGRAMS = {
    "unread": lambda x, e: (summed(x, e), x + 1)[1],
    "weighted": lambda x, e: (summed(x, e, torch.full((3, 1), 2.0)), x + 1)[1],
    "overwritten": lambda x, e: summed(x, e).zero_() + x,
    "shape": lambda x, e: x.new_ones(summed(x, e).shape) + x,
    "other rows": lambda x, e: torch.cat([summed(x, e), x])[3:] + 1,
    "no rows": lambda x, e: summed(x, e)[:0],
    "some rows": lambda x, e: summed(x, e)[1:2],
    "beside one that is read": lambda x, e: (summed(x[:2], e), summed(x, e))[1],
    "caught": caught,
    "after a write": after_a_write,
}
GOOD, SOURCE, DESTINATION = [[0, 1, 1], [1, 0, 0]], [[0, 1, 9], [1, 2, 0]], [[0, 1, 1], [1, 2, 9]]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name, dynamic, mode):
    if name == "caught":
        expects.eager("a compiled call raised what eager does not, or what the program catches")
    if name.endswith("rows"):
        expects.no_kernels("what is read is a library call's")
    f = PROGRAMS[name]
    compiled = vitrify.compile(f, dynamic=True) if dynamic else vitrify.compile(f)

    def outcome(f, edges):
        x = torch.arange(6.0).view(3, 2)
        try:
            with mode():
                return f(x, torch.tensor(edges)).tolist(), x.tolist()
        except (IndexError, RuntimeError) as e:
            return type(e), x.tolist()

    for edges in (GOOD, SOURCE, GOOD, DESTINATION, GOOD):
        assert outcome(compiled, edges) == outcome(f, edges)
