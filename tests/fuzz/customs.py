"""Custom ops that random programs call: one that computes, ones that write, one whose result's size follows from its values."""
from __future__ import annotations

import torch

Tensor = torch.Tensor


@torch.library.custom_op("fuzz::scaled", mutates_args=())
def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


@scaled.register_fake
def _(x, by):
    return torch.empty_like(x)


scaled.register_autograd(lambda ctx, g: (g * ctx.by, None), setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]))


@torch.library.custom_op("fuzz::bump_", mutates_args=("x",))
def bump_(x: Tensor) -> None:
    x.add_(1)


@bump_.register_fake
def _(x):
    return None


@torch.library.custom_op("fuzz::rows_first", mutates_args=())
def rows_first(x: Tensor) -> Tensor:
    """Reads its argument's memory: whatever strides the caller sees are the ones it is given."""
    return torch.tensor([float(s) for s in x.stride()], dtype=torch.float32) + x.flatten()[:1].float()


@rows_first.register_fake
def _(x):
    return torch.empty(x.dim() if x.numel() else 0, dtype=torch.float32)


@torch.library.custom_op("fuzz::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    return x[x > 0].clone()


@positive.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.custom_op("fuzz::pair", mutates_args=("x",))
def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(0.5)
    return x + 1, x.sum()


@pair.register_fake
def _(x):
    return torch.empty_like(x), x.new_empty(())


class Scale(torch.autograd.Function):
    """Saves what it is given; its derivative uses both."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return (g * w).sum_to_size(x.shape), (g * x).sum_to_size(w.shape)


class Pair(torch.autograd.Function):
    """Two results; the gradient of one that nobody uses is None."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x.sin()

    @staticmethod
    def backward(ctx, g, h):
        return g * 2 if h is None else h if g is None else g * 2 + h


class Dirty(torch.autograd.Function):
    """Writes to its argument and gives it back."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Straight(torch.autograd.Function):
    """A derivative that is not that of the forward; integers beside it have none."""

    @staticmethod
    def forward(ctx, x):
        rounded = x.round()
        signs = (x > 0).long()
        ctx.mark_non_differentiable(signs)
        return rounded, signs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, _):
        return g
