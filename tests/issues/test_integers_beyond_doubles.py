"""Integer literals beyond 2**53 beside float32: eager rounds them once. By way of a double they were rounded twice, and near the middle of two floats became the neighbour."""
import beside
import pytest
import torch
import vitrify

MIDDLE = 2 ** 60 + 2 ** 36
PROGRAMS = ["x == v", "x > v", "x.fmod(v)", "x.remainder(v)", "x * 0 + v - x", "x * v / v", "torch.full((2,), v, dtype=torch.float32) - x", "torch.full((2,), v).float() - x", "torch.full_like(x, v) - x", "x.clone().fill_(v) - x", "x.masked_fill(x > 0, v) - x", "x == torch.tensor(v)",
            "torch.where(x > 0, v, x) - x", "x.clamp(min=v) - x", "torch.add(x, y, alpha=v)", "torch.addcmul(x, x, x, value=v)", "torch.floor_divide(x, v)", "x == torch.tensor(v).item()", "x.index_fill(0, torch.tensor([0]), v) - x", "x.scatter(0, torch.tensor([0]), v) - x", "(torch.full((2,), v) + x) - x"]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("v", [MIDDLE + 1, MIDDLE - 1, -MIDDLE - 1, 2 ** 53 + 1])
@pytest.mark.parametrize("text", PROGRAMS)
def test_literals(text, v, dtype):
    f = beside.program(f"return {text}", v=v)
    compiled = vitrify.compile(f, fullgraph=True)
    with torch.no_grad():
        for scale in (1, 2, 1):
            x, y = torch.tensor([2.0 ** 60, 2.0 ** 60 + 2.0 ** 37]).to(dtype) * scale, torch.ones(2, dtype=dtype)
            assert torch.equal(compiled(x, y), f(x, y))
