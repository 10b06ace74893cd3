"""The fast paths of torch.nn.MultiheadAttention and torch.nn.TransformerEncoder as the ops they stand for: opaque ones in eager, whose results lie in memory otherwise
than those of the slow path, and which leave padding out."""
import functools
import sys

import torch
import torch.nn.functional as F

from . import _C


class Padded:
    """What is a nested tensor in eager: rows of zeros follow each sequence."""
    is_nested, requires_grad = True, False

    def __init__(self, rows, kept):
        self.gone = ~kept
        self.rows = rows.masked_fill(self.gone.unsqueeze(-1), 0)
        self.device, self.dtype = rows.device, rows.dtype

    def dim(self):
        return self.rows.dim()

    def to_padded_tensor(self, padding, output_size=None):
        return self.rows.masked_fill(self.gone.unsqueeze(-1), padding)

    def __getattr__(self, name):
        if name.startswith("__"):  # of protocols that it does not follow
            raise AttributeError(name)
        _C.refuse(f"asks a nested tensor for {name}")


def left_aligned(real):
    """Of torch._nested_tensor_from_mask_left_aligned, by which an encoder decides."""
    @functools.wraps(real)
    def nested_tensor_from_mask_left_aligned(t, mask):
        if not _C.capturing():
            return real(t, mask)
        if mask.dtype is not torch.bool or mask.dim() != 2 or t.dim() != 3 or t.shape[:2] != mask.shape or 0 in mask.shape:
            _C.refuse("torch._nested_tensor_from_mask_left_aligned refuses what it is given")
        layer = sys._getframe(1).f_locals.get("first_layer")
        if layer is not None and torch.is_grad_enabled() and (t.requires_grad or any(p.requires_grad for p in layer.parameters())):
            return False  # which is as good: the encoder does not take that path then
        return not (mask[:, 1:] & ~mask[:, :-1]).any()
    return nested_tensor_from_mask_left_aligned


def nested(real):
    """Of torch._nested_tensor_from_mask."""
    @functools.wraps(real)
    def nested_tensor_from_mask(t, mask, mask_check=True):
        if not _C.capturing() or mask_check:
            return real(t, mask, mask_check)
        if not mask.any():  # of no sequence anything: eager's kernels raise, here or on the way back
            _C.refuse("calls torch._nested_tensor_from_mask with a mask that leaves nothing")
        return Padded(t, torch.arange(mask.shape[1], device=mask.device) < mask.sum(1, keepdim=True))  # it counts, wherever the padding is
    return nested_tensor_from_mask


def refuse_casts(op):
    """Its kernel is one op to autocast, and calls others that are cast one by one."""
    if torch.is_autocast_enabled("cpu"):
        _C.refuse(f"calls {op} under autocast, which its kernel sees")


def encoder_layer(real):
    """Of torch._transformer_encoder_layer_fwd."""
    @functools.wraps(real)
    def transformer_encoder_layer_fwd(src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps, norm_weight_1, norm_bias_1,
                                      norm_weight_2, norm_bias_2, ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2, mask=None, mask_type=None):
        if not _C.capturing():
            return real(src, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps, norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2,
                        ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2, mask, mask_type)
        refuse_casts("torch._transformer_encoder_layer_fwd")
        padded = isinstance(src, Padded)
        x, mask, mask_type = (src.rows, src.gone, 1) if padded else (src, mask, mask_type)

        def attend(x):
            return torch._native_multi_head_attention(x, x, x, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type)[0]

        def feed(x):
            return F.linear((F.gelu if use_gelu else F.relu)(F.linear(x, ffn_weight_1, ffn_bias_1)), ffn_weight_2, ffn_bias_2)

        for part, weight, bias in (attend, norm_weight_1, norm_bias_1), (feed, norm_weight_2, norm_bias_2):
            normalize = functools.partial(F.layer_norm, normalized_shape=(embed_dim,), weight=weight, bias=bias, eps=eps)
            x = part(normalize(x)) + x if norm_first else normalize(part(x) + x)
        return Padded(x, ~mask) if padded else x
    return transformer_encoder_layer_fwd


def attention(real):
    """Of torch._native_multi_head_attention, which is called with one tensor as query, key and value."""
    @functools.wraps(real)
    def native(query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask=None, need_weights=True, average_attn_weights=True, mask_type=None):
        if not _C.capturing() or proj_bias is None:  # which it raises for
            return real(query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, need_weights, average_attn_weights, mask_type)
        refuse_casts("torch._native_multi_head_attention")
        batch, length, _ = query.shape
        q, k, v = (x.unflatten(-1, (num_head, -1)).transpose(1, 2) for x in F.linear(query, qkv_weight, qkv_bias).chunk(3, -1))
        if mask is not None:
            mask = mask.to(torch.bool)
            mask = mask.view(batch, 1, 1, length) if mask_type == 1 else mask.view(1, 1, length, length) if mask_type == 0 else mask
        # F.scaled_dot_product_attention() may give zeros where all scores of a row are NaN or -inf. This op's softmax gives NaN.
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        weights = (scores if mask is None else scores.masked_fill(mask, -torch.inf)).softmax(-1)
        out = weights @ v
        if not need_weights or not query.numel():  # of nothing there are no weights
            weights = None
        elif average_attn_weights:
            weights = weights.mean(1)
        return F.linear(out.transpose(1, 2).reshape(batch, length, embed_dim), proj_weight, proj_bias), weights
    return native


def pool(real):
    """Of torch.max_pool1d, which without gradients, and where no mode is on, has a kernel of its own: of floats, into contiguous memory."""
    @functools.wraps(real)
    def max_pool1d(input, *args, **kwargs):
        out = real(input, *args, **kwargs)
        if not _C.capturing() or torch.is_grad_enabled() and input.requires_grad:
            return out
        if not input.is_floating_point():
            _C.refuse("torch.max_pool1d refuses what it is given")
        dense = 1
        for n, stride in zip(reversed(out.shape), reversed(out.stride())):
            if stride != dense:
                return out.clone(memory_format=torch.contiguous_format)
            dense *= n
        return out
    return max_pool1d
