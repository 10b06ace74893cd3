"""torch.utils.checkpoint with use_reentrant=True, while a program is captured: eager's backward starts another one, which torch refuses under ours."""
import threading

import torch
from torch.utils import checkpoint

from . import _C


class _Region(torch.autograd.Function):
    """To autograd it is what eager's node is: it gives results that all need gradients, and gradients that have no history.
    What comes after the arguments are the leaves that the function found elsewhere: eager's backward would add to their .grad."""

    @staticmethod
    def forward(ctx, real, outputs, inputs, *tensors):
        ctx.real, ctx.outputs, ctx.inputs, ctx.wanted = real, outputs, inputs, [t.requires_grad for t in tensors]
        return tuple(_free(o) if isinstance(o, torch.Tensor) else o for o in outputs)

    @staticmethod
    def backward(ctx, *grads):
        if not torch.autograd._is_checkpoint_valid():
            try:
                ctx.real.backward(None)  # says so
            except RuntimeError as e:
                if not _C.note_refusal(str(e)):  # the program's own grad()
                    raise
        if _C.past_checkpoints():
            return (None,) * (3 + len(ctx.inputs))
        heads = [(o, g) for o, g in zip(ctx.outputs, grads) if isinstance(o, torch.Tensor) and o.requires_grad]
        found = iter(_C.gradients([o for o, _ in heads], [g for _, g in heads], [t for t, wanted in zip(ctx.inputs, ctx.wanted) if wanted]))
        return None, None, None, *(next(found) if wanted else None for wanted in ctx.wanted)


def _free(t):
    free = t.detach()
    return free.view_as(free) if t._is_view() else free  # what may not be written to


def _leaves(outputs, inputs, first):
    """What else gradients come to from the outputs; `first`: the number of the first node that the function made."""
    known = {id(t) for t in inputs}
    leaves, seen, todo = [], set(), [o.grad_fn for o in outputs]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            if id(node.variable) not in known:
                leaves.append(node.variable)
        elif node._sequence_nr() < first or node.name() == "VitrifyInput":
            _C.refuse("a reentrant checkpoint comes to tensors with a history that are none of its arguments")
        todo += [n for n, _ in node.next_functions]
    return leaves


def _captured(real, function, preserve, args):
    raised, done = None, False

    def run(*inputs):
        nonlocal raised
        with REPLACED:  # also when gradients are taken once more, after the capture
            try:
                return function(*inputs)
            except BaseException as e:
                if done:  # computed again
                    raise
                raised = e  # past torch's checkpoint, which would leave its hooks behind

    inputs = checkpoint.detach_variable(args)
    first = torch.autograd._get_sequence_nr()
    made = checkpoint.checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=preserve)
    done = True
    if raised is not None:
        raise raised
    outputs = made if type(made) is tuple else (made,)
    if any(not isinstance(o, (torch.Tensor, type(None), bool, int, float, str)) for o in outputs):
        _C.refuse("a reentrant checkpoint returns a container")
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    heads = [o for o in tensors if o.requires_grad]
    bases = [o._base if o._is_view() else o for o in tensors]
    if not heads or len({id(o) for o in tensors}) < len(tensors) or any(not _C.is_fake(b) or b.is_leaf and b.requires_grad for b in bases):
        _C.refuse("a reentrant checkpoint returns what needs no gradients, or what it was given")
    given = [t for t in args if isinstance(t, torch.Tensor)]
    inside = [t for t in inputs if isinstance(t, torch.Tensor)]
    leaves = _leaves(heads, inside, first)
    results = _Region.apply(real, outputs, inside + leaves, *given, *leaves)
    _C.note_checkpoint(next(t for t in results if isinstance(t, torch.Tensor) and t.requires_grad), len(given))
    return results if type(made) is tuple else results[0]


class _Replaced:
    """torch's CheckpointFunction is ours meanwhile."""

    def __init__(self):
        self.lock, self.users = threading.Lock(), 0

    def __enter__(self):
        with self.lock:
            self.users += 1
            if self.users == 1:
                real = self.real = checkpoint.CheckpointFunction

                def apply(function, preserve, *args):
                    trains = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
                    return _captured(real, function, preserve, args) if trains and _C.capturing() else real.apply(function, preserve, *args)

                checkpoint.CheckpointFunction = type(real.__name__, (real,), {"apply": staticmethod(apply)})

    def __exit__(self, *exc):
        with self.lock:
            self.users -= 1
            if self.users == 0:
                checkpoint.CheckpointFunction = self.real


REPLACED = _Replaced()
