"""Message passing over several edge lists that one op gives: each is grouped by its own."""
import pytest
import torch
import vitrify

N, C = 16, 8
torch.manual_seed(0)
EDGES = torch.randint(0, N, (8, 60))


def passed_on(x, e, mean=False):
    to = e[1].unsqueeze(-1).expand(-1, x.shape[1])
    out = x.new_zeros(x.shape).scatter_add(0, to, x.index_select(0, e[0]))
    return out / x.new_zeros(N).scatter_add(0, e[1], x.new_ones(e.shape[1])).clamp(min=1).unsqueeze(-1) if mean else out


def sorted_pairs(edges):
    values, indices = (edges[:2] % N).sort(dim=1)
    return values, indices % N


LISTS = {
    "chunk": lambda edges: edges.chunk(4),
    "split": lambda edges: edges.split(2),
    "unbind": lambda edges: edges.view(4, 2, -1).unbind(),
    "tensor_split": lambda edges: edges.tensor_split(4),
    "sort": sorted_pairs,
}


@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
@pytest.mark.parametrize("lists", LISTS.values(), ids=LISTS)
def test_each_has_its_own_groups(lists, mean):
    def f(x, edges):
        return torch.stack([passed_on(x, e, mean) for e in lists(edges)])

    x, compiled = torch.randn(N, C), vitrify.compile(f)
    with torch.no_grad():
        for edges in (EDGES, EDGES.flip(0), EDGES.flip(1)):
            torch.testing.assert_close(compiled(x, edges), f(x, edges))
