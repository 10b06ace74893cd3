"""What an error of a backward leaves in autograd's queues is let go of after Python's end."""
import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch, vitrify

def program(x):
    y = x.exp()
    z = y[..., ::2].normal_()
    return z, y * y

a, b = vitrify.compile(program)(torch.rand(4, 4, requires_grad=True))
assert vitrify.counters["kernels_launched"]
try:
    (a.sum() + b.sum()).backward()
except RuntimeError as e:
    print(type(e).__name__)
"""


@pytest.mark.no_kernels("they run in a process of their own")
def test_exit_after_a_backward_that_raised():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=dict(os.environ))
    assert (run.returncode, run.stdout.strip()) == (0, "RuntimeError"), run.stderr
