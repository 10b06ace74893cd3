"""Where eager multiplies and adds with one rounding, and where with two."""
import pytest
import torch
import vitrify


def near_the_end(shape, dtype):
    """Sums in range of products that are not."""
    top = torch.finfo(dtype).max
    return torch.full((1, *shape[1:]), -top * 0.6, dtype=dtype), torch.full(shape, top * 0.12, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (1, 16), (1, 3), (1, 2, 9)], ids=str)
@pytest.mark.parametrize("add", [lambda a, i, s: a.index_add(0, i, s, alpha=10), lambda a, i, s: a.clone().index_add_(0, i, s, alpha=10),
                                 lambda a, i, s: a.index_add(0, i, s)], ids=["alpha", "in place", "no alpha"])
def test_index_add(add, shape, dtype):
    def program(a, i, s):
        return add(a, i, s) * 0.5
    compiled = vitrify.compile(program, fullgraph=True)
    before, i = vitrify.counters["kernels_launched"], torch.tensor([0])
    a, s = near_the_end(shape, dtype)
    for a, s in ((a, s), (torch.randn(a.shape).to(dtype), torch.randn(s.shape).to(dtype))):
        torch.testing.assert_close(compiled(a, i, s), program(a, i, s))
    assert vitrify.counters["kernels_launched"] > before


def test_what_cancels():
    def program(x, i):
        return (-(x * 0.3)).index_add(0, i, x, alpha=0.3) == 0
    compiled, x, i = vitrify.compile(program, fullgraph=True), torch.randn(64, 16), torch.arange(64)
    assert torch.equal(compiled(x, i), program(x, i))
