"""What a program can reach besides its arguments: parameters, buffers, closure cells, globals, attributes. One walk finds the tensors a capture may
meet and fills the guards that keep the compiled code valid (docs/python-door.md says what is and what is not watched)."""
import argparse
import contextlib
import contextvars
import dataclasses
import dis
import functools
import gc
import itertools
import random
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, UserDict, UserList, defaultdict, deque

import torch
from torch import nn
from torch.distributions import Distribution
from torch.nn.utils import parametrize
from torch.optim import optimizer as optimizers

from . import _C

PARAMETER, BUFFER, CAPTURED = 1, 2, 3
_SUBSCRIPT = re.compile(r"""\[(?:'[^'\[\]]*'|"[^"\[\]]*"|[\w.+-]*)\]""")  # of keys in which no bracket stands
_AS_DICTS = frozenset({"__dict__", "vars", "dir"})  # by which all attributes can be read
_OF_TENSORS = frozenset(dir(torch.Tensor))  # such names are of the class, or tensors have a slot for them
# Code that mentions one of these may look at the .grad of what it can reach, also through torch's own code.
_READS_GRADS = {"grad", "_grad", "backward", "zero_grad", "clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"}
_LIMIT = 200_000
_DEEP = 50  # what is nested further is put off: Python's stack ends
_LONG = 300  # of a name; the rest of it says no more
_SCALARS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# By id: what is compared with, or hashed, may be a class whose metaclass says how.
_SCALAR_TYPES = frozenset(map(id, _SCALARS))
_LEAVES = frozenset(map(id, (types.UnionType, types.GetSetDescriptorType, types.MemberDescriptorType, dataclasses.Field)))  # nothing follows from these
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
# Code whose state no tensor follows from, or that guards of their own look after (torch, numpy, the standard library).
_LIBRARY = frozenset({"torch", "numpy", "vitrify", "builtins", "typing", "typing_extensions", "sympy", "torchgen", "filelock", "huggingface_hub"}) | sys.stdlib_module_names
_ITERATORS = tuple({type(iter(x)) for x in ([], (), {}, set(), "", b"", range(0), {}.values(), {}.items(), reversed([]))}) + (
    map, filter, zip, enumerate, reversed, types.GeneratorType, *(v for v in vars(itertools).values() if isinstance(v, type)))
_VIEWS = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
_STATEFUL = frozenset({"collections", "queue", "weakref", "_weakrefset", "torch.utils.weak"})  # what these make is kept in attributes
_COMPARED = 1 << 24  # bytes of a buffer that each call compares
# What looks a global up, and by how many bits its argument is more than the place of the name.
_GLOBALS = [(dis.opmap[n], n == "LOAD_GLOBAL") for n in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL")]
_BY_STRING = {"globals", "vars", "eval", "exec"}
_OPTIMIZER_HOOKS = [getattr(optimizers, f"_global_optimizer_{when}_hooks") for when in ("pre", "post")]
# What autograd calls of a class of the user's derivatives.
_OF_FUNCTIONS = frozenset({"forward", "backward", "setup_context", "vjp", "jvp", "vmap"})
# What every module has of dicts, most of them empty: parameters, buffers, submodules, hooks.
_MODULE_DICTS = frozenset(k for k, v in vars(nn.Module()).items() if isinstance(v, dict))
_AROUND = frozenset({"_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"})  # hooks that a call of a module runs
_GLOBAL_HOOKS = [
    v for k, v in vars(torch.nn.modules.module).items() if k.startswith("_global_") and k.endswith("_hooks") and isinstance(v, dict)
]


def is_library(module_name):
    if type(module_name) is not str:  # None, or the descriptor of a metaclass that is written in C
        return True
    return module_name.partition(".")[0] in _LIBRARY and module_name != "__main__"


def is_written_in_library(f):
    name = f.__globals__.get("__name__")  # what wraps a function has its __module__
    return name is not None and is_library(name)


def is_library_function(f):
    return is_library(f.__module__) and (type(f) is not types.FunctionType or is_written_in_library(f))


def code_names(code, out):
    """Names of globals and attributes that a function mentions, also as strings."""
    out.update(code.co_names)
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            code_names(c, out)
        elif type(c) is str and c.isidentifier():
            out.add(c)
    return out


_of_code = {}  # by id: (code, the names that it mentions, those of globals)


def names_of(code):
    known = _of_code.get(id(code))  # its hash is of all that is in it
    if known is None:
        if len(_of_code) >= 4096:
            _of_code.clear()
        known = _of_code[id(code)] = code, frozenset(code_names(code, set())), frozenset(global_names(code))
    return known[1:]


def global_names(code):
    """Names that a function looks up among its globals: an attribute of the same name is another thing."""
    out, code_bytes = set(), code.co_code
    opcodes = code_bytes[::2]
    for op, shift in _GLOBALS:
        at = opcodes.find(op)
        while at >= 0:
            arg, extended, before = code_bytes[2 * at + 1], 8, at - 1
            while before >= 0 and opcodes[before] == dis.EXTENDED_ARG:
                arg |= code_bytes[2 * before + 1] << extended
                extended, before = extended + 8, before - 1
            out.add(code.co_names[arg >> shift])
            at = opcodes.find(op, at + 1)
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            out |= global_names(c)
    return out


def imported(names, package):
    """Modules of the user's that a function may import: those of the names that it mentions, and of packages around it."""
    around = [""]
    for part in (package or "").split("."):
        around.append(f"{around[-1]}{part}.")
    return [m for n in names for p in around if (m := sys.modules.get(p + n)) is not None and type(m) is types.ModuleType and not is_library(m.__name__)]


def _nbytes(o):
    return o.nbytes if hasattr(o, "nbytes") else len(o) * getattr(o, "itemsize", 1)


def _holds_tensor(o, depth=4):
    if isinstance(o, torch.Tensor):
        return True
    if type(o) in _SCALARS or not depth or isinstance(o, (type, types.ModuleType, types.FunctionType, nn.Module)):
        return False
    parts = (*o, *o.values()) if isinstance(o, dict) else o if isinstance(o, (list, tuple, set, frozenset)) else getattr(o, "__dict__", {}).values()
    return any(_holds_tensor(p, depth - 1) for p in parts)


def check_module(m):
    if isinstance(m, torch.jit.ScriptModule):
        raise _C.CaptureError("it holds a TorchScript module")
    if any(c.__module__.startswith(("torch.distributed", "torch.nn.parallel")) for c in type(m).__mro__):
        raise _C.CaptureError(f"it holds a distributed module ({type(m).__name__}), whose hooks communicate")


class _Order:
    """Equal to the keys in their order, which move_to_end changes without an event."""

    def __init__(self, o):
        self.o = o

    def __eq__(self, keys):
        return tuple(self.o) == keys


class _Slots:
    """Equal to what these attributes of an object were, which are in no dict and change without an event. clear() and extend() put them back."""

    def __init__(self, o, *names):
        self.o, self.names = o, names

    def read(self):
        return tuple(getattr(self.o, n) for n in self.names)

    def __eq__(self, had):
        return all(a is b for a, b in zip(self.read(), had))

    def clear(self):
        pass

    def extend(self, had):
        for n, v in zip(self.names, had):
            setattr(self.o, n, v)


_UNSET = object()


class _HereAndNow:
    """Equal to what a threading.local or a ContextVar had, where it has that in the thread and context that asks. clear() and extend() put it back."""

    def __init__(self, o):
        self.o, self.default = o, _UNSET
        if isinstance(o, contextvars.ContextVar):
            with contextlib.suppress(LookupError):  # it has none
                self.default = o.get()

    def read(self):
        return (self.o.get(_UNSET),) if isinstance(self.o, contextvars.ContextVar) else tuple(part for item in vars(self.o).items() for part in item)

    def __eq__(self, had):
        now = self.read()
        return len(now) == len(had) and all(a is b or type(a) is type(b) and type(a) in _SCALARS and repr(a) == repr(b) for a, b in zip(now, had))

    def clear(self):
        if not isinstance(self.o, contextvars.ContextVar):
            vars(self.o).clear()

    def extend(self, had):
        if not isinstance(self.o, contextvars.ContextVar):
            vars(self.o).update(zip(had[::2], had[1::2]))
        elif (value := self.default if had[0] is _UNSET else had[0]) is not _UNSET:  # nothing makes it unset
            self.o.set(value)


def _attributes(o, name):
    try:
        return getattr(o, "__dict__", None)  # made now, if it is made on demand
    except Exception as e:
        raise _C.CaptureError(f"the attributes of {name} cannot be read ({type(e).__name__})") from None


class Unready(Exception):
    """The program cannot be captured yet (lazy modules); this call runs eagerly and the next one tries again."""


class Sources:
    def __init__(self):
        self.guards = _C.Guards()
        self.tensors = {}          # id -> (tensor, kind, name)
        self.seen = {}             # id -> object, kept alive so that ids stay unique
        self.names = {}            # global dict id -> (dict, set of names, label)
        self.todo = deque()
        self.depth = 0
        self.generators = []       # torch.Generator objects
        self.caches = []           # (an lru_cache, its dict, the keys, all that it holds, name)
        self.random = []           # generators of Python's and numpy's
        self.unwatched = []        # (name, why what has it cannot be compared)
        self.own_modules = []      # modules of users that are held as objects are
        self.of_threads = []       # (what has a value in each thread or context, name)
        self.buffers = []          # (object, name) too large to compare unless the program mentions them
        self.modules = False
        self.parametrized = False
        self.live = {"forward"}    # attribute names that code reached so far mentions
        self.members = {}          # name -> class members to visit once it is live
        self.reads_grads = False
        self.bare = None           # a module of which the program is the forward: its hooks run around that
        self.groups = []           # (group, name) of optimizers, whose floats may change

    def looks_at_grads(self):
        return self.reads_grads or bool(_READS_GRADS & self.live)

    def grads(self):
        """The tensors whose .grad the program may look at."""
        if not self.looks_at_grads():
            return []
        found = [o for t, _, _ in self.tensors.values() for o in (t, t._base) if o is not None and (o.is_floating_point() or o.is_complex())]  # one that is frozen may be thawed
        return list({id(t): t for t in found}.values())

    def finish(self, live=lambda group, key: False):
        """`live`: whether a float of an optimizer's group is read anew by every call."""
        met = None
        while met != len(self.seen):  # what tensors hold may mention other names
            while self.todo:
                self.todo.popleft()()
                if len(self.seen) > _LIMIT:
                    raise _C.CaptureError(f"the program can reach more than {_LIMIT} objects")
            met = len(self.seen)
            for m in self.own_modules:
                self.globals(vars(m), self.live, m.__name__, self.live)
            for t, _, name in list(self.tensors.values()):
                for k in self.attributes_read(t):
                    self.visit(vars(t)[k], f"{name}.{k}")
        if self.bare is not None and self.live & _AROUND:
            raise _C.CaptureError("it reads hooks that run around it")
        for name, why in self.unwatched:
            if self.mentions(name):
                raise _C.CaptureError(why)
        for o, name in self.of_threads:
            if self.mentions(name):
                self.guards.add_equal(o, o.read(), name)
        for o, name in self.buffers:
            if self.mentions(name):
                if _nbytes(o) > _COMPARED:
                    raise _C.CaptureError(f"it can read {name}, whose memory is too large to be compared in each call")
                self.guards.add_buffer(o, name)
        for group, label in self.groups:
            self.guards.add_dict(group, tuple(k for k, v in group.items() if not live(group, k)), label)
        for d, names, label in self.names.values():
            self.guards.add_dict(d, tuple(names), label)
        # vars() makes the dict, so that attributes that come later are seen.
        if self.live & _AS_DICTS:
            for t, _, name in self.tensors.values():
                self.guards.add_dict(vars(t), None, name)
        else:
            self.guards.add_names([(vars(t), name) for t, _, name in self.tensors.values()], self.live - _OF_TENSORS)
        if self.modules:
            for d in _GLOBAL_HOOKS:
                self.guards.add_dict(d, None, "torch.nn.modules.module global hooks")
        self.guards.add_dict(vars(torch.backends.mha), ("_is_fastpath_enabled",), "torch.backends.mha")
        self.guards.add_attributes(Distribution, ("_validate_args",), "torch.distributions.Distribution")
        if self.parametrized:
            self.guards.add_dict(vars(parametrize), ("_cache_enabled",), "torch.nn.utils.parametrize")
            if parametrize._cache_enabled:  # by what other calls left there
                raise _C.CaptureError("torch.nn.utils.parametrize.cached() is on around the call")
        self.guards.watch()
        return self

    def mentions(self, name):
        """Whether code reaches what has this name: an attribute under it, or a variable."""
        plain = _SUBSCRIPT.sub("", name)
        return "." not in plain or "[" in plain or plain.rpartition(".")[2] in self.live

    def attributes_read(self, t):
        """Names that the user has given to attributes of a tensor, of those that the program may read."""
        names = vars(t).keys() - {"_vitrify_dims"}
        return names if self.live & _AS_DICTS else names & self.live

    def buffer(self, o, name):
        if _nbytes(o) <= 65536:
            self.guards.add_buffer(o, name)
        else:
            self.buffers.append((o, name))

    def visit(self, o, name):
        t = type(o)
        if id(t) in _SCALAR_TYPES or id(o) in self.seen:
            return
        if self.depth == _DEEP:
            self.todo.append(lambda: self.visit(o, name))
            return
        self.depth += 1
        try:
            self.look_at(o, t, name)
        finally:
            self.depth -= 1

    def look_at(self, o, t, name):
        self.seen[id(o)] = o
        if id(t) in _LEAVES:
            return
        if t is types.FunctionType:
            self.todo.append(lambda: self.function(o, name))
        elif isinstance(o, torch.Tensor):
            self.tensor(o, CAPTURED, name)
        elif isinstance(o, nn.Module):
            self.todo.append(lambda: self.module(o, name))
        elif t is types.MethodType:
            self.visit(o.__func__, name)
            self.visit(o.__self__, name)
        elif t in (types.BuiltinMethodType, types.MethodWrapperType):
            self.visit(o.__self__, name)  # a dict of its get, a Function of its apply in 2.15; of a function a module
        elif isinstance(o, type):
            if not is_library(o.__module__):
                self.todo.append(lambda: self.cls(o, constructed=True))
        elif isinstance(o, _CONTAINERS) and (t.__module__ in ("builtins", "collections") or not is_library(t.__module__)):
            self.container(o, t, name)
            if t is OrderedDict or not is_library(t.__module__):
                self.todo.append(lambda: self.instance(o, name))
        elif t is functools.partial:
            self.guards.add_dict(o.__dict__, None, name)
            self.items(enumerate((o.func, o.args, o.keywords, *o.__dict__.values())), name)
        elif t in _NAMESPACES or isinstance(o, (UserDict, UserList)):
            self.guards.add_object(o)
            self.guards.add_dict(o.__dict__, None, name)
            self.items(list(o.__dict__.items()), name)
        elif any(b.__name__ == "ndarray" and b.__module__ == "numpy" for b in t.__mro__):
            if o.dtype.hasobject:
                self.unwatched.append((name, f"it can read {name}, an array of Python objects"))
            else:
                self.buffer(o, name)
        elif t is bytearray or t is memoryview or t.__module__ == "array":
            self.buffer(o, name)
        elif t in _ITERATORS:
            self.unwatched.append((name, f"it can reach an iterator ({name}), which a capture would move on"))
        elif isinstance(o, (threading.local, contextvars.ContextVar)):
            self.of_threads.append((_HereAndNow(o), name))
            self.items(enumerate([*self.of_threads[-1][0].read(), o.get(None) if isinstance(o, contextvars.ContextVar) else None]), name)
        elif isinstance(o, weakref.ref):
            self.visit(o(), name)
        elif t in _VIEWS:
            for held in gc.get_referents(o):
                self.visit(held, name)
        elif t is functools._lru_cache_wrapper:
            self.todo.append(lambda: self.cache(o, name))
        elif isinstance(o, random.Random) and not isinstance(o, random.SystemRandom) or t.__module__.startswith("numpy.random") and t.__name__ in ("Generator", "RandomState"):
            self.random.append(o)
        elif t is functools.cached_property:
            self.visit(o.func, name)
        elif t is functools.partialmethod:
            for part in (o.func, o.args, o.keywords):
                self.visit(part, name)
        elif t is torch.Generator:
            self.generators.append(o)
        elif isinstance(o, torch.optim.Optimizer):
            self.todo.append(lambda: self.optimizer(o, name))
        elif isinstance(o, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)) or t.__module__ in _STATEFUL and _attributes(o, name) is not None:
            self.todo.append(lambda: self.instance(o, name))  # they write to themselves
        elif t is types.ModuleType:
            if not is_library(o.__name__):
                self.own_modules.append(o)
        elif isinstance(o, BaseException):
            self.guards.add_equal(_Slots(o, "args", "__cause__", "__context__"), (o.args, o.__cause__, o.__context__), name)
            self.items(enumerate((o.args, o.__cause__, o.__context__)), name)
            self.todo.append(lambda: self.instance(o, name))
        elif is_library(t.__module__):
            pass
        elif not callable(o) or _attributes(o, name) is not None:
            self.todo.append(lambda: self.instance(o, name))

    def container(self, o, t, name):
        if isinstance(o, dict):
            self.guards.add_dict(o, None, name)
            self.items(list(o.items()), name)
            self.items(enumerate(k for k in o if type(k) not in _SCALARS), name)
            if isinstance(o, OrderedDict):
                self.guards.add_equal(_Order(o), tuple(o), name)
            if isinstance(o, defaultdict):
                self.guards.add_equal(_Slots(o, "default_factory"), (o.default_factory,), name)  # no slot of a class body, which add_slot takes
                self.visit(o.default_factory, name)
        elif isinstance(o, (set, frozenset, deque)):
            if not isinstance(o, frozenset):
                self.guards.add_equal(o, tuple(o), name)
            self.items(enumerate(o), name)
        elif isinstance(o, (list, tuple)):
            if isinstance(o, list):
                self.guards.add_list(o, name)
            self.items(enumerate(o), name)

    def cache(self, o, name):
        """What an lru_cache holds is the program's to read; other calls may add to it."""
        for held in gc.get_referents(o):
            if type(held) is dict and held is not o.__dict__ and id(held) not in self.seen:
                self.seen[id(held)] = held
                self.guards.add_dict(held, tuple(held), name)
                self.caches.append((o, held, set(held), {id(r): r for r in gc.get_referents(o, held)}, name))
                self.items(list(held.items()), name)
            else:
                self.visit(held, name)

    def empty_caches(self):
        """Takes the placeholders out of them that a capture has put there, and says where that was. What else it has put there is what any call would."""
        wrote = []
        for o, held, keys, before, name in self.caches:
            if held.keys() == keys or not any(_holds_tensor(r) for r in gc.get_referents(o, held) if id(r) not in before):
                continue
            wrote.append(f"the cache of {name}")
            for k in [k for k in held if k not in keys]:
                del held[k]
        return wrote

    def items(self, pairs, name):
        for k, v in pairs:
            if id(type(v)) not in _SCALAR_TYPES:
                self.visit(v, name if len(name) > _LONG else f"{name}[{k!r}]" if isinstance(k, _SCALARS) else f"{name}[{type(k).__name__}]")

    def tensor(self, t, kind, name):
        if torch.nn.parameter.is_lazy(t):
            raise Unready
        if id(t) not in self.tensors:
            self.tensors[id(t)] = (t, kind, name)

    def module(self, root, name):
        self.modules = True
        for path, m in root.named_modules():
            full = f"{name}.{path}" if path else name
            if path and id(m) in self.seen:
                continue
            self.seen[id(m)] = m
            check_module(m)
            self.parametrized = self.parametrized or parametrize.is_parametrized(m)
            g, d = self.guards, m.__dict__
            g.add_object(m)
            keys = None
            if d.get("_compiled_call_impl") is not None:
                keys = tuple(k for k in d if k != "_compiled_call_impl")
            g.add_dict(d, keys, full)
            self.cls(type(m))
            for k, v in d.items():
                if id(type(v)) in _SCALAR_TYPES or k == "_compiled_call_impl":
                    continue
                if k in _MODULE_DICTS:
                    self.seen[id(v)] = v
                if m is self.bare and k in _AROUND:
                    continue
                if k in _MODULE_DICTS and isinstance(v, dict) and not v:
                    g.add_dict(v, None, full if k in ("_parameters", "_buffers") else f"{full}.{k}")
                elif k == "_parameters" or k == "_buffers":
                    g.add_dict(v, None, full)
                    kind = PARAMETER if k == "_parameters" else BUFFER
                    for n, t in v.items():
                        if t is not None:
                            self.seen[id(t)] = t
                            self.tensor(t, kind, f"{full}.{n}".removeprefix("self."))
                elif k == "_modules" or (isinstance(v, dict) and k.startswith("_") and k.endswith("_hooks")):
                    g.add_dict(v, None, f"{full}.{k}")
                    if k != "_modules":
                        self.items(list(v.items()), f"{full}.{k}")
                else:
                    self.visit(v, f"{full}.{k}")

    def optimizer(self, o, name):
        self.reads_grads = True
        self.guards.add_object(o)
        self.cls(type(o))
        self.guards.add_dict(o.__dict__, None, name)
        for d in _OPTIMIZER_HOOKS:
            self.guards.add_dict(d, None, "torch.optim.optimizer global hooks")
            self.items(list(d.items()), "a global optimizer hook")
        self.guards.add_list(o.param_groups, f"{name}.param_groups")
        self.seen[id(o.param_groups)] = o.param_groups
        count = 0
        for g, group in enumerate(o.param_groups):
            label = f"{name}.param_groups[{g}]"
            self.groups.append((group, label))
            self.seen[id(group)] = group
            for p in group["params"]:
                self.visit_tensor(p, PARAMETER, f"{name}.param{count}")
                count += 1
            self.items(list(group.items()), label)
        for k, v in list(o.__dict__.items()):
            if id(type(v)) not in _SCALAR_TYPES:
                self.visit(v, f"{name}.{k}")

    def visit_tensor(self, t, kind, name):
        self.seen[id(t)] = t
        self.tensor(t, kind, name)

    def instance(self, o, name):
        d = _attributes(o, name)
        self.guards.add_object(o)
        self.cls(type(o))
        for base in type(o).__mro__:
            for k, slot in vars(base).items():
                if type(slot) is types.MemberDescriptorType and not is_library(base.__module__):
                    self.guards.add_slot(o, slot, f"{name}.{k}")
                    self.items([(k, getattr(o, k, None))], name)
        if isinstance(d, dict):
            self.guards.add_dict(d, None, name)
            for k, v in list(d.items()):
                if id(type(v)) not in _SCALAR_TYPES:
                    self.visit(v, f"{name}.{k}")

    def cls(self, c, constructed=False):
        if ("cls", id(c)) in self.seen:
            return
        self.seen[("cls", id(c))] = c
        self.guards.add_type(c)
        if not is_library(type(c).__module__):
            self.cls(type(c))
        for base in c.__mro__:
            if is_library(base.__module__) or ("body", id(base)) in self.seen:
                continue
            self.seen[("body", id(base))] = base
            self.guards.add_class(base)
            for k, v in list(vars(base).items()):
                if id(type(v)) in _SCALAR_TYPES:
                    continue
                special = k.startswith("__") and k.endswith("__")
                if k in self.live or k in _OF_FUNCTIONS and issubclass(c, torch.autograd.Function) or special and (constructed or k not in ("__init__", "__new__", "__init_subclass__", "__reduce__")):
                    self.member(v, f"{base.__name__}.{k}")
                else:
                    self.members.setdefault(k, []).append((v, f"{base.__name__}.{k}"))

    def member(self, v, name):
        if isinstance(v, (staticmethod, classmethod)):
            v = v.__func__
        for f in (v.fget, v.fset) if isinstance(v, property) else (v,):
            if f is not None:
                self.visit(f, name)

    def function(self, f, name):
        while hasattr(f, "__wrapped__") and is_library_function(f):
            f = f.__wrapped__
        if not isinstance(f, types.FunctionType):
            return
        if is_library_function(f):
            if f.__module__ == "functools":  # singledispatch and the like hold functions of the user's
                self.cells(f)
            return
        self.guards.add_function(f)
        if f.__dict__ or f.__name__ in f.__code__.co_names:  # it may keep something there
            self.guards.add_dict(f.__dict__, None, f.__name__)
            self.items([(k, v) for k, v in f.__dict__.items() if k not in ("__wrapped__", "__vitrify__")], f.__name__)
        self.cells(f)
        for v in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
            self.visit(v, f"a default of {f.__name__}")
        if f.__kwdefaults__:
            self.guards.add_dict(f.__kwdefaults__, None, f"defaults of {f.__name__}")
        names, direct = names_of(f.__code__)
        for n in names - self.live:
            self.live.add(n)
            for v, label in self.members.pop(n, ()):
                self.member(v, label)
        self.globals(f.__globals__, names if names & _BY_STRING else direct, f.__globals__.get("__name__", "globals"), names, absent=True)
        for m in imported(names, f.__globals__.get("__package__")):
            self.globals(m.__dict__, names, m.__name__, names)
        if getattr(f, "__wrapped__", None) is not None:
            self.visit(f.__wrapped__, name)

    def cells(self, f):
        for cell, var in zip(f.__closure__ or (), f.__code__.co_freevars):
            if ("cell", id(cell)) in self.seen:
                continue
            self.seen["cell", id(cell)] = cell
            self.guards.add_cell(cell, var)
            try:
                self.visit(cell.cell_contents, var)
            except ValueError:
                pass  # empty

    def globals(self, d, names, label, attributes, absent=False):
        known = self.names.setdefault(id(d), (d, set(), label))[1]
        for n in names:
            # no program can write the names under which pytest puts what its rewritten assertions call: its state is none of the program's
            if n in known or n not in d and not absent or not n.isidentifier():
                continue
            known.add(n)
            if n not in d:  # a builtin, or what the program catches the lack of
                continue
            v = d[n]
            if type(v) is types.ModuleType:
                if not is_library(v.__name__) and id(v.__dict__) != id(d):
                    self.globals(v.__dict__, attributes, v.__name__, attributes)
            elif id(type(v)) not in _SCALAR_TYPES:
                self.visit(v, n)
