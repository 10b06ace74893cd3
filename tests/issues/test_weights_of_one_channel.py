"""The gradient of a weight for one channel lies as eager's: either stride of that dim is right, and oneDNN chooses by sizes."""
import bounds
import pytest
import torch
import vitrify

ORDERS = [(0, 1, 2, 3), (0, 1, 3, 2), (1, 0, 3, 2), (3, 0, 1, 2), (2, 3, 0, 1), (0, 2, 3, 1)]


def f(x, w):
    return torch.nn.functional.conv2d(x.sin().contiguous(memory_format=torch.channels_last), w, padding=w.shape[-1] // 2)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_strides_of_the_gradient(batch, kernel, dynamic):
    compiled = vitrify.compile(f, dynamic=dynamic)
    for order in ORDERS:
        found = []
        for g in (compiled, f):
            torch.manual_seed(0)
            sizes = (batch, 1, 8, 8)
            x = torch.randn([sizes[order.index(d)] for d in range(4)]).permute(order)
            w = torch.randn(4, 1, kernel, kernel, requires_grad=True)
            found.append(torch.autograd.grad(g(x, w).sum(), w)[0])
        ours, eager = found
        assert dynamic or ours.stride() == eager.stride(), order  # no kernel is asked where sizes change
        torch.testing.assert_close(ours, eager, **bounds.LAYOUT)
