"""Backward hooks of the module that is compiled. They are for what goes into it and what comes out of it, and run on tensors of the call: around the
compiled forward, as torch.nn.Module._call_impl has them around the plain one. The module's other hooks, which run between the two, do the same."""
import sys
import threading
import warnings

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils.hooks import BackwardHook

from . import _C

_OF_ALL = [getattr(modules, f"_global_{when}_hooks") for when in ("backward_pre", "backward", "forward_pre", "forward")]
_CALL, _STARTS = nn.Module._call_impl.__code__, sys.monitoring.events.PY_START


def run_around(module, compiled):
    """Whether those of `module` do. compiled: its own _compiled_call_impl, if that is ours."""
    held = vars(module)
    if not (held.get("_backward_hooks") or held.get("_backward_pre_hooks")) or not torch.is_grad_enabled() or torch._C._get_tracing_state():
        return False
    t = type(module)
    if t.__call__ is not nn.Module.__call__ or t._call_impl is not nn.Module._call_impl or "_call_impl" in held or held.get("_compiled_call_impl") not in (None, compiled):
        return False
    return not any(_OF_ALL) and not held.get("_forward_hooks_always_called") and (not held.get("_backward_hooks") or held.get("_is_full_backward_hook") is True)


def call(module, forward, args, kwargs):
    """As torch.nn.Module._call_impl does it with that forward."""
    full, pre = [], []
    if module._backward_pre_hooks:
        pre = module._get_backward_pre_hooks()
    if module._backward_hooks:
        full, _ = module._get_backward_hooks()
    for key, hook in (*module._forward_pre_hooks.items(),):
        if key in module._forward_pre_hooks_with_kwargs:
            given = hook(module, args, kwargs)
            if given is None:
                continue
            if not (isinstance(given, tuple) and len(given) == 2):
                raise RuntimeError(f"forward pre-hook must return None or a tuple of (new_args, new_kwargs), but got {given}.")
            args, kwargs = given
        elif (given := hook(module, args)) is not None:
            args = given if isinstance(given, tuple) else (given,)
    around = BackwardHook(module, full, pre) if full or pre else None
    if around:
        args = around.setup_input_hook(args)
    result = forward(*args, **kwargs)
    for key, hook in (*module._forward_hooks.items(),):
        given = hook(module, args, kwargs, result) if key in module._forward_hooks_with_kwargs else hook(module, args, result)
        if given is not None:
            result = given
    if around:
        if not isinstance(result, (torch.Tensor, tuple)):
            warnings.warn(f"For backward hooks to be called, module output should be a Tensor or a tuple of Tensors but received {type(result)}", stacklevel=2)
        result = around.setup_output_hook(result)
    return result


class NotCalled:
    """A program that is the forward of `module` may not call it: its hooks are not of the program, and nobody would see what they do."""

    def __init__(self, module):
        self.module, self.called, self.thread = module, False, threading.get_ident()

    def __enter__(self):
        if self.module is None:
            return
        self.tool = next((i for i in range(5, -1, -1) if sys.monitoring.get_tool(i) is None), None)
        if self.tool is None:
            raise _C.CaptureError("it is a module with hooks, and others watch all calls")
        sys.monitoring.use_tool_id(self.tool, "vitrify")
        sys.monitoring.register_callback(self.tool, _STARTS, self.look)
        sys.monitoring.set_local_events(self.tool, _CALL, _STARTS)

    def look(self, code, offset):
        if threading.get_ident() == self.thread and sys._getframe(1).f_locals["self"] is self.module:
            self.called = True
            self.refuse()

    def refuse(self):
        raise _C.CaptureError("it is a module with hooks, and calls itself")

    def __exit__(self, kind, e, trace):
        if self.module is None:
            return
        sys.monitoring.set_local_events(self.tool, _CALL, 0)
        sys.monitoring.register_callback(self.tool, _STARTS, None)
        sys.monitoring.free_tool_id(self.tool)
        if self.called and kind is None:  # it has caught it
            self.refuse()
