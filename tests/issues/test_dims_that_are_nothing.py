"""A dim that follows from the sizes of the call and has no elements in one: its index is divided by nothing, and nobody computes it."""
import pytest
import torch
import vitrify

OPS = {"repeat": lambda y: y.repeat(1, 2) + 1, "rows": lambda y: y.repeat(2, 1) + 1, "tile": lambda y: y.tile(2) + 1, "turned": lambda y: (y * 2).view(-1, 3).t().reshape(-1) * 2,
       "sum": lambda y: y.repeat(1, 2).sum(1), "cumsum": lambda y: y.repeat(1, 2).cumsum(1), "expanded": lambda y: y.expand(2, *y.shape).reshape(-1) + 1, "roll": lambda y: y.roll(1, 1) * 2,
       "folded": lambda y: y.reshape(1, 3, -1).repeat(2, 1, 1).flatten(1) + 1, "interleaved": lambda y: y.repeat_interleave(2, 1) + 1}


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("name", OPS)
def test_sizes(name, dynamic):
    f = lambda x: OPS[name](x[: x.shape[0] // 3 * 3].view(3, x.shape[0] // 3))
    compiled = vitrify.compile(f, dynamic=dynamic, fullgraph=True)
    for n in (6, 9, 2, 12, 1, 0, 7):
        x = torch.arange(float(n))
        assert torch.equal(compiled(x), f(x)), n


def test_a_division_of_the_program():
    def f(x):
        return x.sum() * (12 // x.shape[0]) + 12 % x.shape[0]
    compiled = vitrify.compile(f, dynamic=True)
    for n in (4, 5):
        assert compiled(torch.ones(n)) == f(torch.ones(n))
    with pytest.raises(ZeroDivisionError):
        f(torch.ones(0))
    with pytest.raises(ZeroDivisionError):
        compiled(torch.ones(0))
