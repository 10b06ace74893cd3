"""Assignments of tensors without dims to elements, slices and masks. torch 2.15 asks there whether the two share memory, which placeholders have none of."""
import beside
import pytest
import torch
import vitrify

WAYS = {
    "element": lambda y, t, k: y.__setitem__((1, 2), t),
    "row": lambda y, t, k: y.__setitem__((0, slice(1, None, 2)), t),
    "column": lambda y, t, k: y.__setitem__((..., 3), t),
    "new dim": lambda y, t, k: y.__setitem__((None, 2), t),
    "mask": lambda y, t, k: y.__setitem__(y > 9, t),
    "indices": lambda y, t, k: y.__setitem__((k, 1), t),
    "one index": lambda y, t, k: y.__setitem__(2, t),
    "other dtype": lambda y, t, k: y.__setitem__((1, 1), t.double()),
    "one element": lambda y, t, k: y.__setitem__((1, slice(None)), t.reshape(1, 1)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of", ["argument", "made", "sum", "itself"])
def test_values(way, of):
    def f(x, t, k):
        y = x * 2
        value = {"argument": t, "made": t * 3, "sum": y.sum(), "itself": y[1, 1]}[of]
        WAYS[way](y, value, k)
        return y + 1, value
    beside.check(f, lambda: (torch.arange(12.0).view(3, 4), torch.tensor(5.0), torch.tensor([0, 2])),
                 "reads memory it writes" if of == "itself" and way in ("mask", "indices", "one element") else None)


@pytest.mark.parametrize("way", WAYS)
def test_gradients(way):
    w, u = torch.tensor(0.5, requires_grad=True), torch.nn.Parameter(torch.tensor(2.0))

    def f(x, k):
        y = x * w
        WAYS[way](y, u, k)
        return (y * y).sum()
    x, k = torch.arange(12.0).view(3, 4) + 1, torch.tensor([0, 2])
    given = [torch.autograd.grad(g(x, k), (w, u)) for g in (f, *[vitrify.compile(f)] * 2)]
    for ours in given[1:]:
        torch.testing.assert_close(ours, given[0])
