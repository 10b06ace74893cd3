"""What a program asks a tensor for that no op of it reads, such as `x.to(self.w.dtype)`: its dtype, sizes, strides or requires_grad may be others in the next call. They were not compared."""
import pytest
import torch
import vitrify
from torch import nn

ASKS = {
    "dtype": lambda w: 2.0 if w.dtype is torch.float32 else 5.0, "shape": lambda w: float(w.shape[0]), "len": lambda w: float(len(w)), "numel": lambda w: float(w.numel()),
    "dim": lambda w: float(w.dim()), "stride": lambda w: float(w.stride()[0]), "contiguous": lambda w: 2.0 if w.is_contiguous() else 5.0, "nbytes": lambda w: float(w.nbytes),
    "requires_grad": lambda w: 2.0 if w.requires_grad else 5.0, "leaf": lambda w: 2.0 if w.is_leaf else 5.0,
}


def assign(w):
    w.data = torch.ones(3, 4, dtype=torch.float64)[:, ::2]


CHANGES = {
    "data": assign, "resized": lambda w: w.resize_(5, 1), "set": lambda w: w.set_(torch.ones(7, 2).t()), "unsqueezed": lambda w: w.unsqueeze_(0), "requires grad": lambda w: w.requires_grad_(not w.requires_grad),
}


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ask", ASKS)
def test_asked_and_changed(ask, change, grad):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("w", torch.ones(2, 2))

        def forward(self, x):
            return x * ASKS[ask](self.w) + 1
    net = Net()
    compiled = vitrify.compile(net)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            assert torch.equal(compiled(torch.ones(2)), net(torch.ones(2)))
        with torch.no_grad():
            CHANGES[change](net.w)
        for _ in range(2):
            assert torch.equal(compiled(torch.ones(2)), net(torch.ones(2)))


def test_dtype_of_the_first_parameter():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.linear = nn.Embedding(4, 3), nn.Linear(9, 2)

        def forward(self, x):
            return self.linear(x).to(next(self.parameters()).dtype) * 2, sum(p.requires_grad for p in self.embed.parameters()) * x
    net = Net()
    compiled, x = vitrify.compile(net), torch.ones(1, 9)
    with torch.no_grad():
        for change in (lambda: None, lambda: None, net.embed.double, lambda: net.embed.requires_grad_(False), net.embed.half):
            change()
            for ours, theirs in zip(compiled(x), net(x), strict=True):
                assert ours.dtype is theirs.dtype
                torch.testing.assert_close(ours, theirs)
