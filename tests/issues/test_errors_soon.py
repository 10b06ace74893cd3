"""What eager refuses, and draws of a generator of one's own, need no Meta kernel: those are written in Python, and import torch's own compiler, for a second or more."""
import subprocess
import sys

import pytest

PROGRAMS = {
    "multigammaln": "torch.special.multigammaln(x, -1)", "trace": "torch.trace(x)", "randn": "torch.randn(3, generator=g) + x",
    "rand": "torch.rand(3, generator=g) + x", "randperm": "torch.randperm(3, generator=g) + x",
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.no_kernels("another process runs them")
def test_no_compiler_of_torch(program):
    code = f"""
import sys, torch, vitrify
g, x = torch.Generator().manual_seed(1), torch.ones(3)
def outcome(f):
    try: return str(f(x))
    except RuntimeError as e: return str(e)
f = lambda x: {program}
ours = outcome(vitrify.compile(f))
assert "sympy" not in sys.modules and "torch._dynamo" not in sys.modules
g.manual_seed(1)
assert ours == outcome(f), (ours, outcome(f))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
