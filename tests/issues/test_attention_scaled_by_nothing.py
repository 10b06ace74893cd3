"""Causal attention with a scale that is not positive: eager's hidden scores are -inf before they are scaled, and their rows NaN. The kernel of ours scaled first."""
import beside
import pytest
import torch
import torch.nn.functional as F


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [-1.0, 0.0, -0.0, 0.5, None])
def test_scale(scale, causal):
    beside.check(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=causal, scale=scale), lambda: [torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))], launches=False)
    beside.check(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=causal, scale=scale) * 2, lambda: [torch.randn(2, 3, 64, 16, generator=torch.Generator().manual_seed(0))])
