"""The first call, for which a gradient of a gradient is compiled, has no rows: the next ones take memory of their own size all the same."""
import pytest
import torch
import vitrify
from torch.autograd import grad

OPS = {
    "softmax": lambda h: h.softmax(0), "log_softmax": lambda h: h.log_softmax(0), "sum": lambda h: h.sin() / h.sum(), "sines": lambda h: h.sin(),
    "deviation": lambda h: (h - h.mean()).square() * h.exp().sum(), "scan": lambda h: h.sin().cumsum(0), "products": lambda h: h[:, None] @ h[None],
}


@pytest.mark.parametrize("backend", ["llvm", "interp"])
@pytest.mark.parametrize("op", OPS)
def test_of_second_order(op, backend):
    f = lambda x, m: OPS[op](x[m])  # noqa: E731
    compiled = vitrify.compile(f, options={"backend": backend})
    for rows in (0, 2, 5, 0, 3):
        said = []
        for g in (compiled, f):
            torch.manual_seed(rows)
            x, m = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.arange(5) < rows
            y = g(x, m)
            first, = grad(y, x, torch.ones_like(y), create_graph=True)
            said.append((y, first, grad(first.square().sum(), x)[0]))
        for a, b in zip(*said, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
