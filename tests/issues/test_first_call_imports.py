"""ATen's Meta kernels in Python have torch import its own compiler when the first of them runs: 880 modules, more than a second of a first call."""
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
import torch.nn.functional as F
import vitrify
x = torch.rand(4, 6)
A = x @ x.mT + torch.eye(4)  # not in the programs: a product rounded otherwise shows where a solution is next to nothing
own = torch.Generator()
known = set(sys.modules)
ops = [lambda x: torch.ldexp(x, torch.ones_like(x)), lambda x: torch.logaddexp2(x, x), lambda x: torch.roll(x, 1), lambda x: torch.linalg.inv_ex(x[:, :4])[0], lambda x: torch.special.zeta(x + 2, x),
       lambda x: F.pixel_unshuffle(x[None, None], 2), lambda x: torch.cdist(x, x), lambda x: torch.histc(x), lambda x: torch.nanmedian(x), lambda x: torch.renorm(x, 2, 0, 1.0), lambda x: F.grid_sample(x[None, None], torch.zeros(1, 2, 2, 2), align_corners=False),
       lambda x: torch.eye(x.shape[0]), lambda x: torch.eye(3, x.shape[1]), lambda x: torch.arange(0, x.shape[0] * .5, .5), lambda x: torch.arange(2.5), lambda x: torch.linspace(0, 1, 4),
       lambda x: torch.logspace(0, 1, 6) + x, lambda x: torch.fft.fftfreq(x.shape[1]) + x, lambda x: torch.fft.rfftfreq(7, .5)[:, None] + x, lambda x: torch.cholesky_inverse(torch.linalg.cholesky(A)),
       lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(A), x), lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(A), x.mT, left=False), lambda x: torch.ormqr(*torch.geqrf(x), x),
       lambda x: torch.linalg.ldl_solve(*torch.linalg.ldl_factor(A), x), lambda x: torch.lu_unpack(*torch.linalg.lu_factor(A))[2] + x.sum(),
       lambda x: torch.hann_window(x.shape[0]), lambda x: torch.hamming_window(5, False), lambda x: torch.blackman_window(6), lambda x: torch.bartlett_window(6, dtype=torch.float64), lambda x: torch.kaiser_window(6),
       lambda x: torch.triu_indices(4, 6), lambda x: torch.tril_indices(3, x.shape[1], -1), lambda x: 0 * torch.multinomial(x.abs() + 1, 2), lambda x: 0 * torch.normal(0.0, 1.0, (2, 3)), lambda x: 0 * F.rrelu(x, .1, .3, training=True),
       lambda x: x[:0][x[:0] > 0], lambda x: x[:0][x[:0, 0] > 0], lambda x: x[:, :0][:, x[0, :0] > 0], lambda x: torch.arange(0.0, -8.5, -4), lambda x: torch.arange(False, True, True, dtype=torch.float32),
       lambda x: torch.linalg.cholesky(A, upper=True), lambda x: torch.cholesky_inverse(A + 0 * x.sum()), lambda x: torch.block_diag(torch.arange(3), x), lambda x: torch.block_diag(torch.arange(3), torch.complex(x, x)).abs(),
       lambda x: 0 * torch.randn(33, generator=own), lambda x: 0 * torch.rand(2, 3, generator=own)]
for mode in (torch.no_grad, torch.inference_mode):
    with mode():
        for op in ops:
            assert torch.allclose(vitrify.compile(lambda x: op(x) * 2)(x), op(x) * 2, equal_nan=True)
counted = dict(vitrify.counters)
assert counted["compiled_calls"] == 2 * len(ops) and not counted["eager_calls"], counted
print(sorted(name for name in set(sys.modules) - known if name.startswith(("torch", "sympy"))))
"""


@pytest.mark.no_kernels("another process compiles")
def test_a_first_call_imports_no_other_compiler():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


REFUSED = {
    "float_index": "x[x]", "double_index": "x[x[:2, 0].double()]", "float_index_of_nothing": "x[:0][x[:0, 0]]", "cauchy": "(x > 0).cauchy_()", "normal": "x.int().normal_(0, 5)", "geometric": "x.clone().geometric_(0)",
    "vdot": "torch.vdot(x[0, 0].int(), x[0, 0].int())", "median": "x[:, :0].median(-1)", "arange": "torch.arange(99, 2, 2, dtype=torch.float32)", "matrix_exp": "torch.linalg.matrix_exp(x[:, :4].int())",
    "lu_solve": "torch.linalg.lu_solve(*(t.long() if t.dtype == torch.int32 else t for t in torch.linalg.lu_factor(x[:, :4])), x)", "masked_fill": "x.to(torch.complex64).masked_fill(x.int(), 1)",
}
REFUSING = """
import sys, os, torch, vitrify
x = torch.rand(4, 6)
def outcome(f):
    try: return str(f(x))
    except Exception as e: return type(e).__name__ + str(e)
known = set(sys.modules)
for name, program in %r.items():
    sys.stdout.flush()
    if os.fork():
        assert not os.wait()[1], name
        continue
    f = eval("lambda x: " + program)
    ours = outcome(vitrify.compile(f))
    imported = [m for m in set(sys.modules) - known if m.startswith(("torch", "sympy"))]
    print(name, imported, ours == outcome(f))
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.no_kernels("another process compiles")
def test_what_a_kernel_refuses_imports_no_other_compiler():
    """The kernel itself has refused it, whatever the values."""
    done = subprocess.run([sys.executable, "-c", REFUSING % REFUSED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [f"{name} [] True" for name in REFUSED]
