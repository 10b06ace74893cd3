"""scaled_dot_product_attention as eager computes it: values, metadata, gradients, masks, sizes that change."""
import bounds
import pytest
import torch
import torch.nn.functional as F
import vitrify
from beside import calls_of

OWN = "AVX512" in torch.backends.cpu.get_cpu_capability()


def operands(batch=2, heads=3, queries=33, keys=50, width=24, inside=False, grad=False):
    torch.manual_seed(0)
    made = []
    for rows in (queries, keys, keys):
        x = torch.randn(batch, rows, heads, width).transpose(1, 2) if inside else torch.randn(batch, heads, rows, width)
        made.append(x.detach().requires_grad_(grad))
    return made


def compare(fn, args, calls="vitrify::attention"):
    want = fn(*args)
    compiled = vitrify.compile(fn, fullgraph=True)
    before = vitrify.counters["kernels_launched"]
    for _ in range(2):
        got = compiled(*args)
        torch.testing.assert_close(got, want, **bounds.ATTENTION, equal_nan=True)
        assert got.stride() == want.stride()
    assert vitrify.counters["kernels_launched"] > before
    if OWN:
        assert calls in calls_of(compiled)
    return compiled


MASKS = {
    "none": lambda: None,
    "rows and columns": lambda: torch.randn(33, 50),
    "columns": lambda: torch.randn(2, 1, 1, 50),
    "rows": lambda: torch.randn(33, 1),
    "transposed": lambda: torch.randn(50, 33).t(),
    "bool": lambda: torch.rand(2, 3, 33, 50) < 0.7,
    "a row sees nothing": lambda: torch.zeros(33, 50).index_fill(0, torch.tensor([4]), -float("inf")),
    "NaN": lambda: torch.zeros(33, 50).index_fill(0, torch.tensor([4]), float("nan")),
}


@pytest.mark.parametrize("inside", [False, True], ids=["heads outside", "heads inside"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, inside):
    torch.manual_seed(1)
    m = MASKS[mask]()
    with torch.no_grad():
        compare(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=m) + 1, operands(inside=inside))


@pytest.mark.parametrize("kwargs", [dict(is_causal=True), dict(scale=0.3), dict(is_causal=True, scale=0.2)], ids=str)
@pytest.mark.parametrize("sizes", [dict(), dict(queries=50), dict(queries=1), dict(queries=48, keys=700), dict(queries=900, keys=900, batch=1, heads=1), dict(width=1, keys=1), dict(width=80)], ids=str)
def test_causal_and_scale(sizes, kwargs):
    with torch.no_grad():
        compare(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **kwargs) * 2, operands(**sizes))


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(causal):
    fn = lambda q, k, v: F.scaled_dot_product_attention(q * 2, k, v, is_causal=causal).sin()  # noqa: E731
    ours, eager = operands(grad=True, inside=True), operands(grad=True, inside=True)
    compiled = vitrify.compile(fn, fullgraph=True)
    before = vitrify.counters["kernels_launched"]
    compiled(*ours).square().sum().backward()
    fn(*eager).square().sum().backward()
    assert vitrify.counters["kernels_launched"] > before
    for a, b in zip(ours, eager):
        torch.testing.assert_close(a.grad, b.grad, **bounds.ATTENTION_GRADIENTS)


def test_sizes_that_change():
    fn = lambda q, k, v: F.scaled_dot_product_attention(q, k, v) + 1  # noqa: E731
    compiled = vitrify.compile(fn, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for queries, keys in ((16, 16), (40, 60), (7, 400)):
            args, before = operands(queries=queries, keys=keys), vitrify.counters["kernels_launched"]
            torch.testing.assert_close(compiled(*args), fn(*args), **bounds.ATTENTION)
            assert vitrify.counters["kernels_launched"] > before
    if OWN:
        assert "vitrify::attention" in calls_of(compiled)


def test_heads_too_long_for_a_copy_are_eagers():
    with torch.no_grad():
        compare(lambda q, k, v: F.scaled_dot_product_attention(q, k, v) + 1, operands(1, 1, 3, 1 << 14, 64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay(dtype):
    args = [x.to(dtype) for x in operands()]
    fn = lambda q, k, v: F.scaled_dot_product_attention(q, k, v) + 1  # noqa: E731
    with torch.no_grad():
        compiled, before = vitrify.compile(fn, fullgraph=True), vitrify.counters["kernels_launched"]
        torch.testing.assert_close(compiled(*args), fn(*args))
    assert vitrify.counters["kernels_launched"] > before
    assert "vitrify::attention" not in calls_of(compiled)
