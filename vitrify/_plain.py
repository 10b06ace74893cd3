"""What Python's numbers can do and torch's symbolic ones cannot: ours do it by their value, which is then guarded, so that no program sees an error that eager does not raise."""
import torch

from . import _C

_ARITHMETIC = "add sub mul floordiv mod truediv pow"
# What symbols answer themselves.
_SYMBOLIC = {f"__{prefix}{name}__" for name in _ARITHMETIC.split() for prefix in ("", "r")} | {
    f"__{name}__" for name in "eq ne lt le gt ge bool neg index floor ceil round repr str".split()}
# What is not asked of a number but of the object, and what makes one.
_OF_OBJECTS = {f"__{name}__" for name in
               "class new init init_subclass subclasshook getattribute setattr delattr dir doc getnewargs sizeof getstate reduce getformat".split()}


def _value(v):
    plain = {torch.SymInt: int, torch.SymFloat: float}.get(type(v))
    return plain(v) if plain and _C.is_ours(v) else v


def _by_value(symbolic, plain, name):
    there = getattr(symbolic, name, None)

    def method(self, *args, **kwargs):
        if _C.is_ours(self):
            return getattr(plain(self), name)(*map(_value, args), **kwargs)
        if there:
            return there(self, *args, **kwargs)
        if args:
            return NotImplemented
        raise TypeError(f"{type(self).__name__} has no {name}()")

    def attribute(self):
        if _C.is_ours(self):
            return getattr(plain(self), name)
        if there:
            return there.__get__(self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    return method if name.startswith("__") else property(attribute)


def _reduce_ex(symbolic, plain):
    there = symbolic.__reduce_ex__
    return lambda self, protocol: (plain, (plain(self),)) if _C.is_ours(self) else there(self, protocol)


for _symbolic, _plain, _own in ((torch.SymInt, int, {"__int__", "from_bytes"}), (torch.SymFloat, float, {"__float__", "__abs__", "fromhex"})):
    for _name in set(dir(_plain)) - _SYMBOLIC - _OF_OBJECTS - _own - {"__reduce_ex__"}:
        setattr(_symbolic, _name, _by_value(_symbolic, _plain, _name))
    _symbolic.__reduce_ex__ = _reduce_ex(_symbolic, _plain)
