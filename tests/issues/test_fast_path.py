"""nn.MultiheadAttention in evaluation: eager takes its fast path, whose results lie otherwise than the slow one's and are NaN where a query sees nothing."""
import re

import bounds
import expects
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


PADDING = {"to the right": [[0] * 6, [0, 0, 0, 1, 1, 1]], "none": [[0] * 6] * 2, "a whole sequence": [[0] * 6, [1] * 6], "between": [[0] * 6, [0, 1, 0, 0, 1, 1]], "to the left": [[0] * 6, [1, 1, 0, 0, 0, 0]]}


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}, {"batch_first": False}], ids=str)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm, check", [(False, True), (True, True), (False, False)], ids=["plain", "norm", "no check"])
def test_encoders_leave_padding_out(options, norm, check):
    """Eager makes a nested tensor of sequences with padding to the right: what lies in the padding reaches nothing, and its rows are zeros. Unchecked, it takes as many tokens as are left, from the first on."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, **{"batch_first": True, **options})
    module = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16) if norm else None, mask_check=check).eval()
    compiled, before = vitrify.compile(module), vitrify.counters["eager_calls"]
    for name, rows in PADDING.items():
        mask = torch.tensor(rows).bool()
        for value in (1.0, float("nan"), float("inf")):
            x = torch.randn(2, 6, 16)
            x[mask] = value
            x = x if options.get("batch_first", True) else x.transpose(0, 1).contiguous()
            with torch.no_grad():
                ours, theirs = compiled(x, src_key_padding_mask=mask), module(x, src_key_padding_mask=mask)
            assert ours.stride() == theirs.stride()
            torch.testing.assert_close(ours, theirs, equal_nan=True, **bounds.DEEP, msg=lambda m, name=name: f"{name}: {m}")
    assert vitrify.counters["eager_calls"] == before


@pytest.mark.parametrize("shape, hidden", [((2, 5), True), ((1, 5), True), ((0, 5), False), ((2, 0), False)], ids=["all hidden", "one, hidden", "no sequence", "empty sequences"])
@pytest.mark.parametrize("first", [False, True], ids=["at once", "after ordinary masks"])
def test_of_no_sequence_anything(first, shape, hidden):
    """What eager's nested tensors refuse."""
    if not first:
        expects.no_kernels("the program raises")
    torch.manual_seed(0)
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval()
    compiled = vitrify.compile(module)
    with torch.no_grad():
        if first:
            for rows in PADDING.values():
                compiled(torch.randn(2, 6, 16), src_key_padding_mask=torch.tensor(rows).bool())
        x, mask = torch.randn(*shape, 16), torch.full(shape, hidden)
        for _ in range(2):
            with pytest.raises((RuntimeError, IndexError)) as theirs:
                module(x, src_key_padding_mask=mask)
            with pytest.raises(theirs.type, match=re.escape(str(theirs.value))):
                compiled(x, src_key_padding_mask=mask)


def test_encoders_that_need_gradients_look_at_no_mask():
    torch.manual_seed(0)
    module = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1).eval()
    compiled, x = vitrify.compile(module), torch.randn(2, 6, 16)
    compiled(x, src_key_padding_mask=torch.tensor(PADDING["none"]).bool())
    before = vitrify.counters["captures"]
    for rows in PADDING.values():
        mask = torch.tensor(rows).bool()
        ours, theirs = (f(x, src_key_padding_mask=mask) for f in (compiled, module))
        torch.testing.assert_close(ours, theirs, equal_nan=True, **bounds.DEEP)
    assert vitrify.counters["captures"] == before


def test_a_projection_without_bias_raises():
    """Eager's fast path takes none, as its argument parser says."""
    module = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    module.out_proj.bias = None
    check(lambda x: module(x, x, x)[0], lambda: [torch.ones(2, 5, 16)], reason="")
    check(lambda x: module(x, x + 1, x + 1)[0], lambda: [torch.ones(2, 5, 16)])  # not its path

    def caught(x):
        try:
            return module(x, x, x)[0]
        except TypeError as e:
            return x + 1, str(e)
    check(caught, lambda: [torch.ones(2, 5, 16)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e20], ids=str)
@pytest.mark.parametrize("part", range(3), ids=["query", "key", "value"])
def test_scores_without_numbers(part, value):
    """A NaN, or scores that overflow, of what each token asks for or tells: this op's softmax gives NaN, where scaled_dot_product_attention() gives zeros."""
    for where in ((0, 4), slice(None)):
        for mask in (None, torch.ones(6, 6, dtype=torch.bool).triu(1)):
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
            x = torch.randn(2, 6, 16)
            with torch.no_grad():
                layer.self_attn.in_proj_weight.view(3, 16, 16)[part][where] = value
                for name, f in {"attention": lambda x: layer.self_attn(x, x, x, need_weights=False, attn_mask=mask)[0], "layer": lambda x: layer(x, mask)}.items():  # noqa: B023
                    if (value, part, name) == (1e20, 2, "layer"):
                        continue  # its norm's squares overflow (docs/differences.md)
                    ours, theirs = vitrify.compile(f)(x), f(x)
                    assert torch.equal(ours.isfinite(), theirs.isfinite()) and torch.equal(ours.isnan(), theirs.isnan()), (name, where, mask is not None)
                    if value < 1e6 or part < 2:
                        torch.testing.assert_close(ours, theirs, equal_nan=True, **bounds.DEEP)
