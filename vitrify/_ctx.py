"""What a user's own autograd.Function keeps as attributes of its ctx, compared before and after its backward: what that changes, the next would find."""
import collections
import functools
import types

import torch

from . import _C
from ._effects import refuse_unfollowed
from ._sources import Sources, Unready

_VALUES = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis))
_ITSELF = (type, types.ModuleType)


class _Unknown:
    """Of what nobody can see whether it changes: an iterator, a file."""

    def __eq__(self, other):
        return False


class _Same:
    def __init__(self, o):
        self.o = o

    def __eq__(self, other):
        return isinstance(other, _Same) and self.o is other.o


def _state(o, seen):
    """Something that compares equal while the object is as it is."""
    if isinstance(o, torch.Tensor):
        return _Same(o), _C.version_of(o)
    if type(o) in _VALUES:
        return type(o), repr(o)
    if isinstance(o, _ITSELF):
        return _Same(o)
    if id(o) in seen:
        return seen[id(o)]
    seen[id(o)] = len(seen)
    held = []
    if isinstance(o, torch.Generator):
        held.append(_C.random_state(o))
    elif hasattr(o, "__next__"):
        return _Unknown()
    elif isinstance(o, collections.abc.Mapping):
        held += [part for item in o.items() for part in item]
    elif isinstance(o, (list, tuple, collections.deque)):
        held += o
    elif isinstance(o, (set, frozenset)):
        held += sorted(o, key=lambda e: (hash(e), id(e)))
    elif isinstance(o, functools.partial):
        held += (o.func, o.args, o.keywords)
    elif isinstance(o, types.BuiltinFunctionType):
        held.append(o.__self__)
    elif isinstance(o, types.MethodType):
        held += (o.__self__, o.__func__)
    elif isinstance(o, types.FunctionType):
        held += [c.cell_contents for c in o.__closure__ or () if c != types.CellType()] + [o.__defaults__, o.__kwdefaults__]
    else:
        try:
            held.append(bytes(memoryview(o)))  # a bytearray, an array of numbers
        except (TypeError, ValueError, BufferError):
            pass
    held.append(getattr(o, "__dict__", None))
    for t in type(o).__mro__:
        slots = t.__dict__.get("__slots__", ())
        held += [getattr(o, name, None) for name in ([slots] if isinstance(slots, str) else slots)]
    return _Same(o), len(held), [_state(part, seen) for part in held]


def _reached(backward):
    """Tensors, and other derivatives of the user's, that the code of a backward can reach."""
    sources = Sources()
    sources.visit(backward, "a backward")
    while sources.todo:
        sources.todo.popleft()()
    return sources.tensors, [o for o in sources.seen.values() if isinstance(o, type) and issubclass(o, torch.autograd.Function)]


def _refuse_unmet(own):
    """What the backward of a derivative reads that another's backward applies is met by second derivatives alone: by then there is no way back."""
    try:
        applied = {o for o in _reached(own.backward)[1] if o is not own}
        reads = [o for o in applied if _reached(o.backward)[0]]
    except (_C.CaptureError, Unready):
        return
    if reads:
        _C.refuse(f"{own.__name__} applies {reads[0].__name__} in its backward, whose own backward reads tensors that it was not given")


def kept(function, in_call):
    """Gives what says later whether it still has what it has now. `in_call`: the call may still be left to eager."""
    if hasattr(function, "_forward_cls"):
        if in_call:
            refuse_unfollowed(function._forward_cls, function.__dict__)
        _refuse_unmet(function._forward_cls)
        if getattr(function._forward_cls, "clear_saved_tensors_on_access", False):
            _C.refuse(f"{function._forward_cls.__name__} lets go of what it has saved when that is read (clear_saved_tensors_on_access)")
    now = lambda: {name: _state(value, {}) for name, value in getattr(function, "__dict__", {}).items()}  # noqa: E731
    try:
        before = now()
    except Exception:  # what it holds is too deep, or does not let itself be looked at
        return lambda: False

    def same():
        try:
            return now() == before
        except Exception:
            return False
    return same


def anew(error, seen=()):
    """The same exception, which has been raised nowhere yet."""
    if error is None or any(error is e for e in seen):
        return None
    try:
        new = type(error).__new__(type(error), *error.args)
        new.__dict__.update(error.__dict__)
    except Exception:  # a constructor of the user's: the same object then
        return error.with_traceback(None)
    seen = (*seen, error)
    new.__cause__, new.__context__, new.__suppress_context__ = anew(error.__cause__, seen), anew(error.__context__, seen), error.__suppress_context__
    return new
