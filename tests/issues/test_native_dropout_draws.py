"""torch.native_dropout() draws also where it drops nothing: what is drawn next is another number."""
import pytest
import torch
import vitrify


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("train", [True, False, None])
@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_native_dropout(p, train, grad):
    def f(x):
        y, mask = torch.native_dropout(x * 2, p, train)
        return torch.nn.functional.dropout(y, 0.5) + 1, mask
    found = []
    for g in (vitrify.compile(f), f):
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 40, requires_grad=grad)
        y, mask = g(x)
        if grad:
            y.sum().backward()
        found.append((y.detach(), mask, torch.rand(3), x.grad if grad else x))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
