"""One tensor given as several arguments, after calls with different ones, and before them: programs ask for that."""
import pytest
import torch
import vitrify
from torch import nn

torch.manual_seed(0)
ATTENTION = nn.MultiheadAttention(8, 2, batch_first=True)
PROGRAMS = {
    "is": lambda a, b: a.sin() * 2 if a is b else a.sin() * 3, "id": lambda a, b: a.sin() * len({id(a), id(b)}), "any": lambda a, b: a.sin() * sum(t is a for t in [a, b, b]),
    "results": lambda a, b: (a, b, a.sin() + b), "attention": lambda a, b: ATTENTION(a, b, b, need_weights=False)[0],
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("order", ["apart, same", "same, apart", "views, same", "same, views"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_orders(name, order, grad):
    f = PROGRAMS[name]
    compiled = vitrify.compile(f)
    for how in order.split(", ") * 2:
        a = torch.randn(2, 3, 8, requires_grad=grad)
        b = {"apart": lambda: torch.randn(2, 3, 8, requires_grad=grad), "same": lambda: a, "views": lambda: a.detach()}[how]()
        with torch.set_grad_enabled(grad):
            ours, theirs = compiled(a, b), f(a, b)
        torch.testing.assert_close(ours, theirs)
        if name == "results":
            assert ours[0] is a and ours[1] is b
        elif grad:
            known = torch.autograd.grad(theirs.sum(), a)
            torch.testing.assert_close(torch.autograd.grad(ours.sum(), a), known)


def test_among_many():
    f = lambda *ts: sum(ts).sin() * len(set(map(id, ts)))  # noqa: E731
    compiled, ts = vitrify.compile(f), [torch.randn(3) for _ in range(20)]
    for repeated in (None, 3, None, 19):
        given = ts if repeated is None else [*ts[:repeated], ts[0], *ts[repeated + 1:]]
        for _ in range(2):
            torch.testing.assert_close(compiled(*given), f(*given))
