"""What of torch is ours while a program is captured: checkpoints, hooks on saved tensors that forget, and assignments to elements."""
import contextlib
import inspect
import threading

import torch
from torch.utils import checkpoint

from . import _C


# What of torch saves the arguments of checkpoints that are not reentrant: from 2.15 on each one's frame does.
_SAVES = "_NoopSaveInputs" if hasattr(checkpoint, "_NoopSaveInputs") else "_CheckpointFrame"
# What of torch runs them: from 2.15 on this takes all but the function's arguments by name, and the one without _impl calls it.
_NAMED = hasattr(checkpoint, "_checkpoint_without_reentrant_generator_impl")
_RUNS = "_checkpoint_without_reentrant_generator" + "_impl" * _NAMED


def _noting(real):
    """The checkpoints that are not reentrant: by what they save their arguments. One inside another has none of its own: the outer one's hooks take
    what it saves, and its backward makes them again."""
    def note(args):
        around = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if _C.capturing() and (around is None or getattr(around[0], "__module__", None) != checkpoint.__name__):
            _C.note_saved([a for a in args if isinstance(a, torch.Tensor)])

    def save_inputs(self, *args):
        note(args)
        real.save_inputs(self, *args)

    def apply(dummy, kwargs, *args):
        note(args)
        return real.apply(dummy, kwargs, *args)
    return type(real.__name__, (real,), {"save_inputs": save_inputs} if hasattr(real, "save_inputs") else {"apply": staticmethod(apply)})


def _reentrant(real):
    """Its function runs without gradients in the forward and with them in the backward, which goes to the leaves by itself: no one graph says both."""
    def apply(function, preserve, *args):
        if _C.capturing() and torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            _C.refuse("a reentrant checkpoint runs its function in the forward and, otherwise, in the backward: use_reentrant=False compiles")
        return real.apply(function, preserve, *args)
    return type(real.__name__, (real,), {"apply": staticmethod(apply)})


def turn(pack, program):
    """Of a call of a compiled program under a checkpoint's hooks: the list in which the checkpoint notes what has served that program's calls, this one's place in
    it, and whether the function is called again. None: it is not known which checkpoint that is, or what has served it.

    Calls of other programs do not count: the function may find what those gave, and call fewer of them, or more, or in another order."""
    pack = inspect.unwrap(pack)  # 2.15 keeps Dynamo out of it
    free = dict(zip(pack.__code__.co_freevars, pack.__closure__ or ()))
    again = "target_frame_ref" in free
    if not again and "frame" not in free:
        return None
    frame = free["target_frame_ref"].cell_contents() if again else free["frame"].cell_contents
    if frame is None:
        return None
    served, calls = frame.__dict__.setdefault("_vitrify_served", {}).setdefault(program, ([], {}))
    if not again:
        served.append(None)
        return served, len(served) - 1, False
    gid = free["gid"].cell_contents
    at = calls[gid] = calls.get(gid, -1) + 1
    return (served, at, True) if at < len(served) else None


def _enters_again(context):
    """Torch's own, and what stands for them here, may be entered each time that a derivative is taken; of others, nobody knows what they do then."""
    return type(context) is contextlib.nullcontext or type(context).__module__.partition(".")[0] in ("torch", __package__)


def _entering(real):
    """A checkpoint that is not reentrant, by the contexts that it enters in the forward and in the backward."""
    def checked(context_fn):
        def contexts():
            made = context_fn()
            if _C.capturing() and not all(_enters_again(c) for c in made):
                _C.refuse("a checkpoint enters contexts that are none of torch's (context_fn), in each backward")
            return made
        return context_fn if context_fn is checkpoint.noop_context_fn else contexts

    def run(function, preserve, context_fn, /, *args, **kwargs):
        return real(function, preserve, checked(context_fn), *args, **kwargs)

    def run_named(*args, context_fn, **kwargs):
        return real(*args, context_fn=checked(context_fn), **kwargs)
    return run_named if _NAMED else run


def _caching(real):
    """The part of a program of which a selective checkpoint caches results."""
    def enter(self):
        self._first = torch.autograd._get_sequence_nr()
        return real.__enter__(self)

    def leave(self, *exc):
        if _C.capturing():
            _C.note_cached(id(self.storage), self._first)
        return real.__exit__(self, *exc)
    return type(real.__name__, (real,), {"__enter__": enter, "__exit__": leave})


def _left(made):
    """How many of an op's results have not been taken out yet. 2.15 numbers them, and marks those that were taken, and the calls that are made again."""
    return len(made) if isinstance(made, list) else sum(not any(one is mark for mark in (checkpoint._CONSUMED, checkpoint._RECOMPUTE)) for one in made.values())


def _cached(real):
    """What selective checkpoints have cached, a backward takes out: derivatives that are taken of a capture later find it again. Another backward of the same call does not.

    It is known by the address of what was cached into, which this keeps from being another's."""
    def enter(self):
        if _C.takes_gradients():
            if not hasattr(self, "_all"):
                self._of, self._all = self.storage, {op: made.copy() for op, made in self.storage.items()}
            self.storage = {op: made.copy() for op, made in self._all.items()}
        return real.__enter__(self)

    def leave(self, *exc):
        if _C.takes_gradients() and any(2 * _left(self.storage[op]) < _left(made) for op, made in self._all.items()):
            _C.note_taken(id(self._of))
        return real.__exit__(self, *exc)
    return type(real.__name__, (real,), {"__enter__": enter, "__exit__": leave})


class _Packed:
    """What a program's hooks have made of one tensor, and what they made of that for the first of the derivatives taken."""

    def __init__(self, packed):
        self.packed, self.given = packed, None


def _remembering(real):
    """Hooks that forget what they have given back: eager's backward asks once, each derivative that is taken of a capture once more."""
    def enter(self):
        pack, unpack = self.pack_hook, self.unpack_hook
        if not _C.capturing() or getattr(pack, "__module__", None) == checkpoint.__name__:  # a checkpoint computes again
            return real(self)

        def given(of):
            if not _C.takes_gradients():
                return unpack(of.packed)
            before = _C.random_state()
            try:
                t = unpack(of.packed)
                if _C.random_state() != before:
                    _C.refuse("hooks on saved tensors draw random numbers when they give one back, in each backward")
            except _C.CaptureError:
                raise
            except Exception:
                if of.given is None:
                    raise
                return of.given
            if isinstance(t, torch.Tensor):
                of.given = t
            return t if of.given is None else of.given
        self.pack_hook, self.unpack_hook = lambda t: _Packed(pack(t)), given
        try:
            return real(self)
        finally:
            self.pack_hook, self.unpack_hook = pack, unpack
    return enter


def _assigning(real):
    """From 2.15 on, assignments by several indices ask of a tensor without dims whether its memory is what they write, and a placeholder has none. They don't ask of one
    with a dim of size 1, which they take to be the same."""
    def assign(self, index, value):
        if type(value) in (torch.Tensor, torch.nn.Parameter) and (_C.is_fake(self) or _C.is_fake(value)):
            with torch._C.DisableTorchFunction():  # modes of the program's see what it calls
                value = value if value.dim() else value.unsqueeze(0)
        return real(self, index, value)
    return assign


class _Replaced:
    """These of torch's are ours while there are users. An interrupt may come between any two lines: what is done already may be done again."""

    MADE = {(checkpoint, "CheckpointFunction"): _reentrant, (checkpoint, _RUNS): _entering,
            (checkpoint, _SAVES): _noting, (checkpoint, "_CachingTorchDispatchMode"): _caching,
            (checkpoint, "_CachedTorchDispatchMode"): _cached, (torch.autograd.graph.saved_tensors_hooks, "__enter__"): _remembering}
    if torch.__version__ >= (2, 15):
        MADE[torch.Tensor, "__setitem__"] = _assigning

    def __init__(self):
        self.lock, self.users, self.ours, self.real = threading.Lock(), set(), {}, {}

    def begin(self, user):
        with self.lock:
            self.users.add(user)
            for place, make in self.MADE.items():
                found = getattr(*place)
                if found is not self.ours.get(place):
                    self.real[place], self.ours[place] = found, make(found)
                    setattr(*place, self.ours[place])

    def end(self, user):
        with self.lock:
            self.users.discard(user)
            for place, ours in self.ours.items():
                if not self.users and getattr(*place) is ours:
                    setattr(*place, self.real[place])


REPLACED = _Replaced()
