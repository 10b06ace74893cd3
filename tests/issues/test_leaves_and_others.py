"""Programs that ask whether what they are given is a leaf: each call is answered as eager is."""
import expects
import pytest
import torch
import vitrify

FNS = {
    "is_leaf": lambda x: x * 2 if x.is_leaf else x.sin(),
    "grad_fn": lambda x: x * 2 if x.grad_fn is None else x.sin(),
    "neither": lambda x: x.exp().sin(),
}


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (1, 0, 1)], ids=str)
@pytest.mark.parametrize("name", FNS)
def test_calls_with_both(name, order):
    """The answer that the first call got was that of all."""
    fn = FNS[name]
    if name == "grad_fn":
        expects.eager("reads grad_fn of a tensor")  # that is no leaf: another history in each call
    compiled = vitrify.compile(fn, fullgraph=name != "grad_fn")
    for is_leaf in order:
        grads = []
        for f in (compiled, fn):
            x = torch.linspace(-1, 1, 6).requires_grad_(True)
            out = f(x if is_leaf else x * 1)
            out.sum().backward()
            grads.append((out.detach(), x.grad))
        torch.testing.assert_close(grads[0], grads[1])
