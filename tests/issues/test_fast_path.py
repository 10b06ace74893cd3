"""nn.MultiheadAttention in evaluation: eager takes its fast path, whose results lie otherwise than the slow one's and are NaN where a query sees nothing."""
import pytest
import torch
import vitrify
from beside import check
from torch import nn

CALLS = {
    "weights": lambda m, x: m(x, x, x),
    "no weights": lambda m, x: m(x, x, x, need_weights=False)[0],
    "of each head": lambda m, x: m(x, x, x, average_attn_weights=False),
    "causal": lambda m, x: m(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1), need_weights=False)[0],
    "some keys": lambda m, x: m(x, x, x, key_padding_mask=torch.tensor([[0, 0, 0, 1, 1], [0, 1, 0, 0, 0]]).bool()),
    "some keys, no weights": lambda m, x: m(x, x, x, key_padding_mask=torch.tensor([[0, 0, 0, 1, 1], [0, 1, 0, 0, 0]]).bool(), need_weights=False)[0],
    "nothing to see": lambda m, x: m(x, x, x, key_padding_mask=torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]).bool(), need_weights=False)[0],
    "both masks": lambda m, x: m(x, x, x, key_padding_mask=torch.tensor([[0, 0, 0, 1, 1], [0, 1, 0, 0, 0]]).bool(), attn_mask=torch.ones(5, 5, dtype=torch.bool).triu(1), need_weights=False)[0],
    "other keys": lambda m, x: m(x, x + 1, x + 1),
    "a float mask": lambda m, x: m(x, x, x, attn_mask=torch.randn(5, 5), need_weights=False)[0],
    "one sequence": lambda m, x: m(x[0], x[0], x[0]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("grad", [False, True])
def test_multihead_attention(call, batch_first, grad):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 2, batch_first=batch_first).eval()

    def given():
        torch.manual_seed(1)
        return [torch.randn(2, 5, 16) if batch_first else torch.randn(5, 2, 16)]
    check(lambda x: call(module, x), given, grad=grad)


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_encoder_layers(options, masked):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options).eval()
    mask = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 0, 0, 0]]).bool() if masked else None

    def given():
        torch.manual_seed(1)
        return [torch.randn(2, 5, 16)]
    check(lambda x: layer(x, src_key_padding_mask=mask), given)


def test_the_path_is_put_back():
    before = torch.backends.mha.get_fastpath_enabled, torch._native_multi_head_attention
    module = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    compiled = vitrify.compile(lambda x: module(x, x, x))
    with torch.no_grad():
        compiled(torch.randn(2, 5, 16))
    assert before == (torch.backends.mha.get_fastpath_enabled, torch._native_multi_head_attention) and torch.backends.mha.get_fastpath_enabled()
