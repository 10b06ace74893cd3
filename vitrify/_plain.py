"""What Python's numbers can do and torch's symbolic ones cannot: ours do it by their value, which is then guarded, so that no program sees an error that eager does not raise."""
import operator

import torch

from . import _C

# What symbols compute and compare themselves, and whose operands Python has the other way round.
_BINARY = {f"__{name}__": getattr(operator, name) for name in "add sub mul floordiv mod truediv eq ne lt le gt ge".split()} | {"__pow__": pow}
_BY_VALUE = {"__divmod__": divmod} | {f"__{name}__": getattr(operator, f"__{name}__") for name in "and or xor lshift rshift".split()}
_REFLECTED = {f"__r{name[2:]}": f for name, f in (_BINARY | _BY_VALUE).items() if name not in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")}
_COMPUTED = {*_BINARY, *(f"__r{name[2:]}" for name in _BINARY)}
_OPERATORS = _BINARY | _BY_VALUE | _REFLECTED
_SYMBOLIC = {f"__{name}__" for name in "bool neg index floor ceil repr str".split()}
# What is not asked of a number but of the object, and what makes one.
_OF_OBJECTS = {f"__{name}__" for name in
               "class new init init_subclass subclasshook getattribute setattr delattr dir doc getnewargs sizeof getstate reduce getformat".split()}
_PLAIN = {torch.SymInt: int, torch.SymFloat: float}


def _value(v):
    plain = _PLAIN.get(type(v))
    return plain(v) if plain and _C.is_ours(v) else v


def _by_operator(name, number, other, *more):
    """Of two values: Python asks the other operand too, and its errors name both."""
    return _REFLECTED[name](other, number, *more) if name in _REFLECTED else _OPERATORS[name](number, other, *more)


def _computed(symbolic, plain, name):
    """By symbols, and by values where those raise or do not know the other operand: an error is Python's own then."""
    there = getattr(symbolic, name)

    def method(self, *others):
        if not _C.is_ours(self):
            return there(self, *others)
        others = [int(o) if isinstance(o, bool) else o for o in others]
        try:
            result = there(self, *others)
        except _C.CaptureError:
            raise
        except Exception:
            result = NotImplemented
        if result is not NotImplemented or any(isinstance(o, torch.Tensor) for o in others):
            return result
        others = map(_value, others)
        return _by_operator(name, plain(self), *others) if name in _OPERATORS else getattr(plain(self), name)(*others)

    method.__wrapped__ = there
    return method


def _by_value(symbolic, plain, name):
    there = getattr(symbolic, name, None)

    def method(self, *args, **kwargs):
        if _C.is_ours(self):
            args = [_value(a) for a in args]
            result = getattr(plain(self), name)(*args, **kwargs)
            return _by_operator(name, plain(self), *args) if result is NotImplemented and name in _OPERATORS else result
        if there:
            return there(self, *args, **kwargs)
        if name == "__float__":  # as float() does where there is none
            return float(operator.index(self))
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


for _symbolic, _plain, _own in ((torch.SymInt, int, {"__int__", "from_bytes"}), (torch.SymFloat, float, {"__float__", "fromhex"})):
    _shared = {n for n in _OPERATORS if hasattr(_symbolic, n) and not hasattr(_plain, n)}  # torch has them for floats too
    for _name in (set(dir(_plain)) | _shared) - _SYMBOLIC - _OF_OBJECTS - _own - {"__reduce_ex__"}:
        _is_computed = _name in _shared | _COMPUTED or _name == "__abs__" and hasattr(_symbolic, _name)
        setattr(_symbolic, _name, (_computed if _is_computed else _by_value)(_symbolic, _plain, _name))
    _symbolic.__reduce_ex__ = _reduce_ex(_symbolic, _plain)
