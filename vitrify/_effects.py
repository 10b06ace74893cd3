"""What the code of a user's own derivative may do besides its gradients. It is captured once for each way in which gradients come, possibly long after the call:
by then there is no way back to eager. So this looks at the code, of which a capture runs one path only."""
import collections
import dis
import types

import torch

from . import _C
from ._sources import _ITERATORS, Sources, Unready, is_library, is_written_in_library

_WRITES = {"STORE_GLOBAL": "a global", "DELETE_GLOBAL": "a global", "STORE_ATTR": "an attribute", "DELETE_ATTR": "an attribute",
           "STORE_DEREF": "a variable of the function around it", "DELETE_DEREF": "a variable of the function around it"}
_WRITES_INTO = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"})
_MUTATES = frozenset(
    "append appendleft extend extendleft insert add update pop popitem popleft remove discard clear setdefault sort reverse rotate move_to_end put put_nowait "
    "subtract difference_update intersection_update symmetric_difference_update __setitem__ __delitem__".split())
_WITHOUT_CONTENT = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_BY_NAME = frozenset({"setattr", "delattr", "globals", "vars", "exec", "eval", "__dict__", "__setattr__", "__delattr__"})
_GENERATORS = frozenset({"manual_seed", "seed", "set_state", "set_rng_state", "fork_rng", "get_state", "get_rng_state", "initial_seed"})
_OUTPUT = frozenset({"write", "writelines", "debug", "info", "warning", "error", "critical", "environ", "putenv"})  # but for those that tensors have, as log
_MODES = frozenset({
    "is_anomaly_enabled", "is_anomaly_check_nan_enabled", "get_num_threads", "get_num_interop_threads", "set_num_threads", "get_float32_matmul_precision",
    "are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled", "get_deterministic_debug_mode", "get_default_dtype", "get_default_device",
    "is_autocast_enabled", "is_autocast_cpu_enabled", "is_autocast_cache_enabled", "get_autocast_dtype", "get_autocast_cpu_dtype", "is_inference_mode_enabled",
    "is_multithreading_enabled", "backends"})


def _codes(code):
    yield code
    for c in code.co_consts:
        if isinstance(c, types.CodeType):
            yield from _codes(c)


def _is_in_place(name):
    return name in _MUTATES or name.endswith("_") and not name.endswith("__") and name != "requires_grad_" and hasattr(torch.Tensor, name)


def _of(code):
    """Of a function's code: what it does outside of itself, or None, and whether it writes into objects at all, which may be its own."""
    into, outside = False, None
    of_others = set(code.co_freevars)  # what a function within it shares with it is its own
    for c in _codes(code):
        for i in dis.get_instructions(c):
            if i.argval == "requires_grad":
                if i.opname == "LOAD_ATTR":  # of what it has made itself it may set that
                    outside = "reads requires_grad of a tensor, which may be set otherwise by then,"
            elif i.opname == "STORE_ATTR" and code.co_name == "__init__":
                pass  # of an object that is new
            elif i.opname in _WRITES and ("DEREF" not in i.opname or i.argval in of_others):
                outside = f"changes {_WRITES[i.opname]} ({i.argval})"
            elif i.opname in _WRITES_INTO or i.opname == "BINARY_OP" and i.argrepr.endswith("=") or i.opname.startswith("INPLACE_"):
                into = True
        names = set(c.co_names)
        for which, does in ((_BY_NAME, "may change attributes"), (_GENERATORS, "sets or reads generators"), (_OUTPUT, "writes to a stream, a log or the environment"), (_MODES, "reads a mode, which may be another around a backward")):
            if found := sorted(which & names):
                outside = f"{does} ({found[0]})"
        into = into or any(map(_is_in_place, names)) or any(isinstance(k, tuple) and "out" in k for k in c.co_consts)
    return outside, into


_of_code = {}  # by id: (code, what _of says)


def _known(code):
    known = _of_code.get(id(code))
    if known is None:
        if len(_of_code) >= 4096:
            _of_code.clear()
        known = _of_code[id(code)] = code, _of(code)
    return known[1]


def _may_be_written(o):
    """Whether it is an object of which others see what code writes into it."""
    return isinstance(o, (torch.Tensor, list, dict, set, collections.deque, bytearray)) or not isinstance(o, _WITHOUT_CONTENT) and hasattr(o, "__dict__")


def refuse_unfollowed(function, attributes):
    """Refuses a class of derivatives whose backward may change, or read, what no capture follows. `attributes`: what is kept in its ctx."""
    sources = Sources()
    try:
        sources.visit(function.backward, "a backward")
        if is_library(function.backward.__module__):  # of custom ops torch makes a class of its own around the user's
            for cell in function.backward.__closure__ or ():
                sources.visit(getattr(cell.cell_contents, "_backward_fn", None), "a backward")
        for name, o in attributes.items():
            if not isinstance(o, torch.Tensor):
                sources.visit(o, name)
        while sources.todo:
            sources.todo.popleft()()
    except (_C.CaptureError, Unready):
        return
    reached, writes_into = list(sources.seen.values()), False
    for o in reached:
        if isinstance(o, _ITERATORS):
            _C.refuse(f"{function.__name__} may move an iterator on in its backward, which may be captured after the call")
        if isinstance(o, types.FunctionType) and not is_written_in_library(o):
            outside, into = _known(o.__code__)
            if outside:
                _C.refuse(f"{function.__name__} {outside} in its backward, which may be captured after the call")
            writes_into = writes_into or into
    if writes_into and (sources.tensors or any(map(_may_be_written, reached))):
        _C.refuse(f"{function.__name__} may write in its backward to what it has not made, which may be captured after the call")
