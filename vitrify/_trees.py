"""How containers that are not built in are taken apart and put together again."""
import dataclasses
import enum
import sys

from torch.utils import _pytree as pytree

from . import _C


def _unflatten(context, children):
    cls, inner = context
    return pytree.SUPPORTED_NODES[cls].unflatten_fn(children, inner)


def _undataclass(context, children):
    cls, names = context
    o = cls.__new__(cls)
    for n, v in zip(names, children):
        object.__setattr__(o, n, v)
    return o


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
        return True
    if dataclasses.is_dataclass(o) and "torch" != cls.__module__.partition(".")[0]:
        names = tuple(f.name for f in dataclasses.fields(o) if hasattr(o, f.name))
        if "__dict__" in dir(o) and set(vars(o)) - set(names):
            return None
        return [getattr(o, n) for n in names], (cls, names), _undataclass
    np = sys.modules.get("numpy")
    if np is not None and isinstance(o, np.ndarray):
        return "is a numpy array"
    return None


_C.set_flatten_hook(flatten)
