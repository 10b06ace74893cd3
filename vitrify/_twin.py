"""The twin of a module: an object of a subclass of its class that shares its __dict__, whose call is compiled."""
import copy
import weakref

from . import _C

_set_class = object.__dict__["__class__"].__set__


class _TwinBase:
    __slots__ = ()

    def __init_subclass__(cls, **kwargs):
        pass  # the user's hook must not see our classes


_types = weakref.WeakKeyDictionary()


def _get_class(self):
    original = _C.twin_original(self)
    return type(self).__mro__[2] if original is None else type(original)


def _put_class(self, cls):
    original = _C.twin_original(self)
    if original is None:
        _set_class(self, cls)
    else:
        original.__class__ = cls
        resync(self, original)


def _reduce_ex(self, protocol):
    original = _C.twin_original(self)
    return super(_TwinBase, self).__reduce_ex__(protocol) if original is None else original.__reduce_ex__(protocol)


def _again(self, original):
    from ._door import compile

    return compile(original, **_C.twin_state(self).settings)


def _deepcopy(self, memo):
    original = _C.twin_original(self)
    result = memo[id(self)] = _again(self, copy.deepcopy(original, memo))
    return result


def _copy(self):
    return _again(self, copy.copy(_C.twin_original(self)))


def _del(self):
    _C.unlink_twin(self)


def _dict_slots(cls):
    out = {}
    for c in cls.__mro__:
        for name, v in vars(c).items():
            if type(v).__name__ == "member_descriptor" and name not in ("__dict__", "__weakref__"):
                out.setdefault(name, v)
    return out


def _forward_slot(slot):
    def target(self):
        original = _C.twin_original(self)
        return self if original is None else original

    return property(lambda s: slot.__get__(target(s)), lambda s, v: slot.__set__(target(s), v), lambda s: slot.__delete__(target(s)))


def type_for(cls):
    twin_type = _types.get(cls)
    if twin_type is None:
        body = {
            "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, "__slots__": (),
            "__class__": property(_get_class, _put_class), "__reduce_ex__": _reduce_ex, "__deepcopy__": _deepcopy, "__copy__": _copy,
            "__del__": _del, "__call__": _C.twin_call_descriptor(),
        }
        body.update((name, _forward_slot(slot)) for name, slot in _dict_slots(cls).items())
        twin_type = type.__new__(type(cls), cls.__name__, (_TwinBase, cls), body)
        _C.arm_twin_type(twin_type, cls, resync)
        _types[cls] = twin_type
    return twin_type


def resync(twin, original):
    """The original changed its class or replaced its __dict__ (parametrize, lazy modules, FSDP)."""
    cls = type_for(type(original))
    if type(twin) is not cls:
        _set_class(twin, cls)
    object.__setattr__(twin, "__dict__", original.__dict__)


def make(original, state):
    twin = object.__new__(type_for(type(original)))
    object.__setattr__(twin, "__dict__", original.__dict__)
    _C.link_twin(twin, original, state)
    return twin
