"""How containers that are not built in are taken apart and put together again."""
import collections
import dataclasses
import enum
import gc
import sys
import types
import weakref

import torch
from torch import nn
from torch.utils import _pytree as pytree

from . import _C
from ._numbers import REFUSAL, is_number


def _unflatten(context, children):
    cls, inner = context
    return pytree.SUPPORTED_NODES[cls].unflatten_fn(children, inner)


def _undataclass(context, children):
    cls, names = context
    o = cls.__new__(cls)
    for n, v in zip(names, children):
        object.__setattr__(o, n, v)
    return o


def _unslice(cls, children):
    return cls(*children)


def _is_plain(v):
    return type(v) in (int, float, complex, bool, str, bytes, type(None)) or type(v) in (tuple, frozenset) and all(map(_is_plain, v))


def _unobject(context, children):
    cls, names = context
    o = object.__new__(cls)
    vars(o).update(zip(names, children))
    return o


class _Plain:
    pass


def _is_its_attributes(cls):
    """Whether an object of this class is its __dict__ and nothing else: no slots, no state of C code, nothing that runs when it is made or freed."""
    return (cls.__basicsize__ == _Plain.__basicsize__ and cls.__itemsize__ == 0 and cls.__dictoffset__ and cls.__new__ is object.__new__
            and not hasattr(cls, "__del__") and not issubclass(cls, nn.Module))


def flatten(o, is_result):
    """(children, context, rebuild) of a container; True for a plain value; a reason why not; None: an object with an identity."""
    cls = type(o)
    node = pytree.SUPPORTED_NODES.get(cls)
    if node is not None:
        children, inner = node.flatten_fn(o)
        return children, (cls, inner), _unflatten
    if isinstance(o, enum.Enum):
        return True
    if cls.__module__ == "numpy":
        if cls.__name__ == "ndarray":
            return "is a numpy array" if is_result else "is a numpy array: pass a tensor"
        return True
    if cls is frozenset:
        return True if not is_result or all(map(_is_plain, o)) else "is a frozenset of more than numbers and texts"
    if cls is slice:
        return [o.start, o.stop, o.step], cls, _unslice
    if dataclasses.is_dataclass(o) and "torch" != cls.__module__.partition(".")[0]:
        names = tuple(f.name for f in dataclasses.fields(o) if hasattr(o, f.name))
        if "__dict__" in dir(o) and set(vars(o)) - set(names):
            return None
        return [getattr(o, n) for n in names], (cls, names), _undataclass
    if is_number(o):
        return REFUSAL
    np = sys.modules.get("numpy")
    if np is not None and isinstance(o, np.ndarray):
        return "is a numpy array"
    if is_result and _is_its_attributes(cls):
        names = tuple(vars(o))
        return list(vars(o).values()), (cls, names), _unobject
    return None


def check_made(held, known):
    """Objects in a result are made again by every call: which is what the program does if it made them, gave each once and kept none.
    held: a list that is all that holds the result. known: by id, what was there before and is given back as it is."""
    nodes, made, todo = {id(held): held}, [], [held[0]]
    while todo:
        o = todo.pop()
        if type(o) in (str, int, float, bool, types.NoneType) or isinstance(o, (torch.Tensor, type, types.FunctionType)) or id(o) in known:
            continue
        if id(o) in nodes:
            if type(o) in (tuple, slice):
                continue
            raise _C.CaptureError(f"the result holds an object of type {type(o).__name__} twice")
        if isinstance(o, (tuple, list)):
            children = o
        elif type(o) is dict:
            children = o.values()
        else:
            found = flatten(o, True)
            if type(found) is not tuple:
                continue
            children = found[0]
            if found[2] not in (_unflatten, _unslice):
                made.append(o)
        nodes[id(o)] = o
        todo.extend(children)
    o = children = found = todo = None  # noqa: F841  (what they hold would count)
    if made and _held_elsewhere(nodes, made):
        gc.collect()  # a frame in a cycle holds what its locals name
        if name := _held_elsewhere(nodes, made):
            raise _C.CaptureError(f"the result holds an object of type {name} that is held elsewhere too")


def _held_elsewhere(nodes, made):
    """The type of an object in `made` that something else than the nodes and their attributes refers to, or None."""
    inside = collections.Counter()
    for o in nodes.values():
        referents = gc.get_referents(o)
        attributes = getattr(o, "__dict__", None)
        if any(r is attributes for r in referents):
            referents += gc.get_referents(attributes)
        inside.update(map(id, referents))
    o = referents = attributes = None  # noqa: F841
    here = [*made, _Plain()]
    alone = sys.getrefcount(here[-1])
    for i in range(len(made)):
        # two more: `made` and `nodes`
        if sys.getrefcount(here[i]) != alone + inside[id(here[i])] + 2 or weakref.getweakrefcount(here[i]):
            return type(here[i]).__name__
    return None


_C.set_flatten_hook(flatten)
