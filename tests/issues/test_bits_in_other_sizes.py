"""A mask that is kept as bits is unpacked in the sizes of its call: a second derivative unpacked it in those of the capture."""
import pytest
import torch
import vitrify
from torch.autograd import grad


@pytest.mark.parametrize("sizes", [[(70, 72), (66, 64)], [(70, 72), (72, 70)], [(5033,), (5040,)], [(5040,), (5033,)]], ids=str)
def test_second_derivatives(sizes):
    def f(x, w):
        return torch.where(x > w, x * w, x.sin())

    made = []
    for call in (f, vitrify.compile(f, fullgraph=True, dynamic=True)):
        torch.manual_seed(0)
        made.append([])
        for size in sizes:
            x, w = (torch.randn(size, dtype=torch.float64, requires_grad=True) for _ in range(2))
            slope, = grad(call(x, w).sin().sum(), x, create_graph=True)
            made[-1] += [slope, *grad(slope.sin().sum(), (x, w))]
    for ours, eager in zip(made[1], made[0], strict=True):
        torch.testing.assert_close(ours, eager)
    assert vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0
