"""torch.nn.MultiheadAttention's fast path as the ops it stands for: one opaque op in eager, whose results lie in memory otherwise than those of the slow path."""
import functools
import sys

import torch
import torch.nn.functional as F

from . import _C


def enabled(real):
    """Of torch.backends.mha.get_fastpath_enabled: whole encoder layers take the other path, whose results are alike."""
    @functools.wraps(real)
    def get_fastpath_enabled():
        return real() and (not _C.capturing() or sys._getframe(1).f_globals.get("__name__") == "torch.nn.modules.activation")
    return get_fastpath_enabled


def attention(real):
    """Of torch._native_multi_head_attention, which is called with one tensor as query, key and value."""
    @functools.wraps(real)
    def native(query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask=None, need_weights=True, average_attn_weights=True, mask_type=None):
        if not _C.capturing():
            return real(query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask, need_weights, average_attn_weights, mask_type)
        batch, length, _ = query.shape
        q, k, v = (x.unflatten(-1, (num_head, -1)).transpose(1, 2) for x in F.linear(query, qkv_weight, qkv_bias).chunk(3, -1))
        if mask is not None:
            mask = mask.to(torch.bool)
            mask = mask.view(batch, 1, 1, length) if mask_type == 1 else mask.view(1, 1, length, length) if mask_type == 0 else mask
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            weights = (scores if mask is None else scores.masked_fill(mask, -torch.inf)).softmax(-1)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            weights = None
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -torch.inf))
            if mask is not None:  # softmax of nothing but -inf
                out = out.masked_fill(mask.all(-1, keepdim=True), torch.nan)
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
