"""An interrupt at any line of what a capture changes in the process: nothing of it stays, and the next capture has it all."""
import builtins
import linecache
import sys

import pytest
import torch
import vitrify
from torch.utils import checkpoint
from vitrify import _checkpoint, _numbers, _process

FILES = {m.__file__ for m in (_process, _checkpoint, _numbers)}


class AtLine:
    """A KeyboardInterrupt at the n-th of the lines that run in these files, where it comes to that line first. `met`: which ran."""

    def __init__(self, n):
        self.n, self.met = n, set()

    def trace(self, frame, event, arg):
        file, line = frame.f_code.co_filename, frame.f_lineno
        if file not in FILES:
            return None
        # As a block is left, its first line runs again before the lock is let go: no signal is handled there, but a trace is called.
        if event == "line" and (file, line) not in self.met and not linecache.getline(file, line).strip().startswith("with "):
            self.met.add((file, line))
            if len(self.met) == self.n:
                raise KeyboardInterrupt
        return self.trace

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *exc):
        sys.settrace(None)


def program(x):
    return checkpoint.checkpoint(lambda t: t.sin() * t, x, use_reentrant=False) * max(x.shape[0], 2)


def gradient(f):
    x = torch.linspace(-1, 1, 6).requires_grad_()
    f(x).sum().backward()
    return x.grad


@pytest.mark.parametrize("part", range(4))
def test_an_interrupt_at_every_line(part):
    around = (builtins.print, builtins.max, torch.compile, checkpoint.CheckpointFunction)
    eager, n, interrupted = gradient(program), part + 1, 0
    while True:
        vitrify.reset()
        compiled = vitrify.compile(program)
        with AtLine(n) as at:
            try:
                gradient(compiled)
            except KeyboardInterrupt:
                interrupted += 1
        assert (builtins.print, builtins.max, torch.compile) == around[:3] and not vitrify._C.capturing() and not torch.compiler.is_compiling(), n
        before = dict(vitrify.counters)
        torch.testing.assert_close(gradient(vitrify.compile(program)), eager)
        assert vitrify.counters["kernels_launched"] > before["kernels_launched"] and vitrify.counters["eager_calls"] == before["eager_calls"], n
        if len(at.met) < n:
            break
        n += 4
    assert interrupted > 10
