"""Warnings that name the user's line."""
import functools
import os
import signal
import sys
import traceback
import warnings

import torch

from . import _C

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def is_user_file(filename):
    if filename.startswith((_HERE, _TORCH, "<frozen")):
        return False
    return not (filename.startswith(_STDLIB) and "site-packages" not in filename)


def user_frame(exc):
    """(file, line, function) of the innermost frame of an exception's traceback that is the user's; None if there is none."""
    for frame, line in reversed(list(traceback.walk_tb(exc.__traceback__))):
        if is_user_file(frame.f_code.co_filename):
            return frame.f_code.co_filename, line, frame.f_code.co_name
    return None


def comes_from_outside(exc):
    """Whether it is no error of the program: an interrupt, or what a handler of signals raised while the program ran."""
    if isinstance(exc, KeyboardInterrupt):
        return True
    handlers = {_code(h) for s in signal.valid_signals() if callable(h := signal.getsignal(s))} - {None}
    return bool(handlers) and any(frame.f_code in handlers for frame, _ in traceback.walk_tb(exc.__traceback__))


def _code(handler):
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    return getattr(handler, "__code__", None) or getattr(getattr(type(handler), "__call__", None), "__code__", None)


def first_line(exc):
    """Of its text, which the user's class makes, or of a placeholder that it holds: that may raise."""
    try:
        return str(exc).strip().partition("\n")[0] or type(exc).__name__
    except Exception:
        return type(exc).__name__


def caller():
    frame = sys._getframe(1)
    while frame and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else ("<unknown>", 0, "<unknown>")


def where(place):
    return f"{place[0]}:{place[1]} in {place[2]}"


def warn(message, place=None):
    place = place or caller()
    warnings.warn_explicit(message, _C.VitrifyWarning, place[0], place[1])
