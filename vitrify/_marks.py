"""Marks: on tensors, which dimensions may change from call to call; on hooks, what they do not change."""
import functools

import torch

from . import _C

UNBOUNDED = (1 << 63) - 1


def _dims(tensor, dim):
    if not isinstance(tensor, torch.Tensor):
        raise _C.OptionError(f"a tensor is expected, not {type(tensor).__name__}")
    for d in dim if isinstance(dim, (tuple, list)) else (dim,):
        if not isinstance(d, int) or not -tensor.dim() <= d < tensor.dim():
            raise _C.OptionError(f"dimension {d} does not exist in a tensor with {tensor.dim()} dimensions")
        yield d % tensor.dim()


def _mark(tensor, dim, value):
    marks = dict(getattr(tensor, "_vitrify_dims", {}))
    for d in _dims(tensor, dim):
        marks[d] = value
    tensor._vitrify_dims = marks


def mark_dynamic(tensor, dim, *, min=2, max=None):
    """This dimension (or these) will change: compile for any size in [min, max]."""
    _mark(tensor, dim, (True, min, UNBOUNDED if max is None else max))


def maybe_mark_dynamic(tensor, dim):
    """As mark_dynamic, but only a hint."""
    _mark(tensor, dim, (True, 2, UNBOUNDED))


def mark_static(tensor, dim=None):
    """This dimension (all of them without `dim`) keeps its size: never make it dynamic."""
    _mark(tensor, tuple(range(tensor.dim())) if dim is None else dim, (False, 0, UNBOUNDED))


def mark_lossless(pack):
    """Of the `pack` of a `torch.autograd.graph.saved_tensors_hooks`: a hook that does the same, under which calls stay compiled.

    It says that `unpack` gives back what `pack` was given: the same values, dtype and size, in whatever memory. Calls under other hooks run eagerly, since a
    compiled call saves less than eager does, and other values. Torch's own hooks (`save_on_cpu`, checkpoints) need no mark."""
    if not callable(pack):
        raise _C.OptionError(f"mark_lossless: pack is expected to be a function of a tensor, not {type(pack).__name__}")

    @functools.wraps(pack)
    def lossless(tensor):
        return pack(tensor)
    lossless.__vitrify_lossless__ = True
    return lossless
