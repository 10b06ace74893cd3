"""nn.MultiheadAttention in eval mode has no weights to give where there are no elements; ours were empty ones."""
import pytest
import torch
import vitrify


@pytest.mark.compiled("there is nothing to compute")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_of_nothing(need_weights, dynamic):
    m = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    compiled = vitrify.compile(lambda x: m(x, x, x, need_weights=need_weights), fullgraph=True, dynamic=dynamic)
    for size in ((3, 0, 8), (0, 5, 8), (3, 5, 8)):
        x = torch.ones(size)
        with torch.no_grad():
            (ours, weights), (eager, expected) = compiled(x), m(x, x, x, need_weights=need_weights)
        torch.testing.assert_close(ours, eager)
        assert (weights is None) == (expected is None), size
        if expected is not None:
            torch.testing.assert_close(weights, expected)
