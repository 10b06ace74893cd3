"""Parameters whose .data is another tensor by the time of the backward: where eager has saved them it reads what is there by then, and raises where it is of another size."""
import pytest
import torch
import vitrify


def leaf(seed):
    return torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)).requires_grad_(True)


FNS = {"mm": lambda x, w: x @ w, "mul": lambda x, w: x * w}
DATA = {
    "other": lambda: leaf(2).detach(),
    "transposed": lambda: leaf(2).detach().t(),
    "expanded": lambda: leaf(2).detach()[:1].expand(16, 16),
    "windowed": lambda: torch.cat([leaf(2).detach()] * 2, 1)[:, 3:19],
    "smaller": lambda: leaf(2).detach()[:2, :2],
    "larger": lambda: torch.cat([leaf(2).detach()] * 2),
    "empty": lambda: torch.empty(0),
    "double": lambda: leaf(2).detach().double(),
}


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("fn", FNS)
def test_another_tensor(fn, data, twice):
    """The plan read the new memory as if it were of the old sizes, strides and type."""
    results = []
    compiled = vitrify.compile(FNS[fn], fullgraph=True)
    for f in (compiled, FNS[fn]):
        for _ in range(2):
            x, w = leaf(0), leaf(1)
            out = f(x, w)
            w.data = DATA[data]()
            try:
                if twice:
                    first, = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
                    results.append([first.detach()])
                else:
                    out.sum().backward()
                    results.append([x.grad])
            except RuntimeError:
                results.append(None)
    for ours, eager in zip(results[:2], results[2:]):
        assert (ours is None) == (eager is None)
        for a, b in zip(ours or (), eager or ()):
            torch.testing.assert_close(a, b)
