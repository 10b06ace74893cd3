import bounds
import torch
from torch import nn


def same(a, b):
    """Equal structure, dtype, shape, strides; values within the accuracy rule's spirit for fp32."""
    assert type(a) is type(b), (type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride(), (a.dtype, b.dtype, a.shape, b.shape, a.stride(), b.stride())
        torch.testing.assert_close(a, b, **(bounds.NET if a.is_floating_point() or a.is_complex() else {}))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            same(x, y)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for k in a:
            same(a[k], b[k])
    else:
        assert a == b, (a, b)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(3, 4)
        self.register_buffer("b", torch.ones(4))

    def forward(self, x):
        return torch.relu(self.l(x)) * self.b


def frozen(m):
    return m.eval().requires_grad_(False)
