"""oneDNN's gelu is another formula by processor: of infinity one gives NaN, and others infinity."""
import pytest
import torch
import torch.nn.functional as F
import vitrify


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [2, 16, 37])
def test_what_is_not_finite(size, dtype, approximate):
    x = torch.linspace(-3, 3, size).to(dtype)
    x[-1], x[0] = float("inf"), float("-inf")
    f = lambda x: F.gelu(x, approximate=approximate) * 1  # noqa: E731
    with torch.no_grad():
        ours, eager = vitrify.compile(f)(x), f(x)
    assert torch.equal(ours.isnan(), eager.isnan()) and torch.equal(ours.isinf(), eager.isinf())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2, 37])
@pytest.mark.parametrize("dynamic", [False, True])
def test_where_twice_it_is_too_large(size, dtype, dynamic):
    """2^127 itself, twice which overflows, was let through as finite."""
    limit = torch.tensor(2.0**127, dtype=dtype)
    below = torch.nextafter(limit, torch.zeros((), dtype=dtype))
    compiled = vitrify.compile(lambda x: F.gelu(x) * 1, dynamic=dynamic)
    for at in (limit, below, -limit):
        x = at.expand(size).clone()
        with torch.no_grad():
            assert torch.equal(compiled(x), F.gelu(x) * 1)
