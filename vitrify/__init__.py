"""Vitrify: compiles PyTorch programs to native kernels. `fast = vitrify.compile(model_or_function)`."""
import torch  # the extension links against torch's libraries

from ._C import CaptureError, CompilerError, Error, OptionError, RecompileError, VitrifyWarning
from ._door import compile, compile_, compile_regions, disable, is_compiling, reset
from ._marks import mark_dynamic, mark_lossless, mark_static, maybe_mark_dynamic
from ._report import counters, metrics, options

__version__ = "0.1.0"
__all__ = [
    "compile", "compile_", "compile_regions", "disable", "is_compiling", "reset", "counters", "metrics", "options",
    "mark_dynamic", "mark_static", "maybe_mark_dynamic", "mark_lossless",
    "Error", "OptionError", "CaptureError", "RecompileError", "CompilerError", "VitrifyWarning",
]
