"""What a call writes to a view that it is given: gradients come through the view and through its base, whether the base had a gradient before or not."""
import pytest
import torch
import vitrify

WRITES = {
    "times": lambda x, y: y.mul_(x),
    "its sum": lambda x, y: y.mul_(x).sum(),
    "copied": lambda x, y: (y.copy_(x * 3), None)[1],
    "zeroed": lambda x, y: y.mul_(x).zero_(),
    "drawn": lambda x, y: y.add_(x).normal_(),
}


@pytest.mark.parametrize("of", ["a result", "nothing"])
@pytest.mark.parametrize("name", WRITES)
def test_gradients(name, of):
    def outcome(f):
        torch.manual_seed(0)
        leaf = torch.ones(2, 3, requires_grad=of != "nothing")
        base = leaf * 2 if of == "a result" else leaf.clone()
        x, y = torch.full((3,), 2.0, requires_grad=True), base[0]
        out = f(x, y)
        loss = y.sum() + base.square().sum()
        if out is not None:
            loss = loss + out.sum()
        loss.backward()
        return x.grad, leaf.grad, base, y
    torch.testing.assert_close(outcome(vitrify.compile(WRITES[name], fullgraph=True)), outcome(WRITES[name]))
