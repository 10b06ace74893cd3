"""Composites of ATen that ask whether a mode is there: what they do then is not what eager does. And the kernels of ops are asked on made-up values only where none of these is a place in memory."""
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from beside import check, steps

R = lambda *size: torch.randn(size, generator=torch.Generator().manual_seed(3))  # noqa: E731
MODES = pytest.mark.parametrize("mode", ["no_grad", "inference", "grad"])
TOLERANCES = dict.fromkeys(("atol", "rtol"), 0.1)  # of matrix_rank
A, RANK = 2 * torch.eye(4), torch.full((), -7)


def beside(fn, make, mode, **more):
    check(fn, make, around=torch.inference_mode if mode == "inference" else torch.enable_grad if mode == "grad" else torch.no_grad, grad=mode == "grad", **more)


RANKS = {
    "plain": lambda a, o: torch.linalg.matrix_rank(a, out=o), "tol": lambda a, o: torch.linalg.matrix_rank(a, tol=0.1, out=o), "hermitian": lambda a, o: torch.linalg.matrix_rank(a, hermitian=True, out=o),
    "atol": lambda a, o: torch.linalg.matrix_rank(a, **TOLERANCES, out=o), "a tensor": lambda a, o: torch.linalg.matrix_rank(a, atol=torch.tensor(0.1), out=o),
    "svdvals": lambda a, o: torch.linalg.svdvals(a, out=o), "eigvalsh": lambda a, o: torch.linalg.eigvalsh(a, out=o), "cond": lambda a, o: torch.linalg.cond(a, "nuc", out=o),
}


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("given", ["fits", "empty"])
@MODES
def test_out_arguments_are_written(name, given, mode):
    values = name in ("svdvals", "eigvalsh")

    def fn(a, o):
        r = RANKS[name](a * 2, o)
        return r is o, o + 1
    size = () if given == "fits" and not values else (4,) if given == "fits" else (0,)
    reason = "resizes its out argument" if given == "empty" and not values and name != "cond" else None
    beside(fn, lambda: [2 * torch.eye(4), torch.full(size, -7, dtype=torch.float32 if values or name == "cond" else torch.int64)], mode, reason=reason)


def test_an_out_argument_that_the_program_reaches_by_itself():
    def fn(x):
        torch.linalg.matrix_rank(A, out=RANK)
        r = RANK + x.long()
        RANK.fill_(-7)
        return r
    check(fn, lambda: [torch.ones(3)])


ODD = {
    "linear, a bias of another dtype": (lambda x, w, b: F.linear(x.transpose(1, 2), w, b), lambda: [R(2, 3, 5, 4), R(6, 4), R(6).double()]),
    "linear, a bias of two dims": (lambda x, w, b: F.linear(x.transpose(0, 1), w, b) * 2, lambda: [R(3, 2, 4), R(6, 4), R(3, 6)]),
    "attention, a mask of another dtype": (lambda q, m: F.scaled_dot_product_attention(q, q, q, m) * 2, lambda: [R(2, 3, 4, 8), R(4, 4).bool()]),
    "values only": (lambda x: (torch.linalg.svdvals(x) * 2, torch.linalg.eigvals(x).abs() * 2, torch.linalg.eigvalsh(x @ x.mT) * 2), lambda: [R(5, 5)]),
}
RAISING = {
    "linear, a larger bias": (lambda x, w, b: F.linear(x.transpose(0, 1), w, b), lambda: [R(3, 2, 4), R(1, 4), R(5)]),
    "attention, a larger mask": (lambda q, m: F.scaled_dot_product_attention(q, q, q, m), lambda: [R(3, 4, 8), R(2, 3, 4, 4)]),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_added_in_place(name):
    fn, make = ODD[name]
    check(fn, make)


@pytest.mark.parametrize("name", RAISING)
def test_what_is_added_in_place_does_not_fit(name):
    fn, make = RAISING[name]
    check(fn, make, reason="")


OUTS = {
    "norm": lambda x, o: torch.linalg.norm(x, dim=1, out=o), "quantile": lambda x, o: torch.quantile(x, 0.5, out=o), "tensordot": lambda x, o: torch.tensordot(x, x.t(), 1, out=o),
    "matmul": lambda x, o: torch.matmul(x.expand(2, 3, 4), x.t(), out=o), "kron": lambda x, o: torch.kron(x, x, out=o), "hstack": lambda x, o: torch.hstack([x, x], out=o),
    "multi_dot": lambda x, o: torch.linalg.multi_dot([x, x.t(), x], out=o), "vecdot": lambda x, o: torch.linalg.vecdot(x, x, out=o), "a size of the program's": lambda x, o: o.resize_(3, 2).fill_(1),
    "diff of none": lambda x, o: torch.diff(x, n=0, out=o), "diff": lambda x, o: torch.diff(x, out=o), "both": lambda x, o: torch.linalg.norm(x, dim=1, out=o.resize_(7)),
}


@pytest.mark.parametrize("name", OUTS)
@pytest.mark.parametrize("mode", ["no_grad", "inference"])
@pytest.mark.filterwarnings("ignore:An output with one or more elements")
def test_versions_of_out_arguments_that_get_another_size(name, mode):
    beside(lambda x, o: (OUTS[name](x * 2, o), None)[1], lambda: [torch.arange(12.0).view(3, 4), torch.empty(0)], mode)


PIVOTS = """
import torch, vitrify
A = torch.rand(5, 5); A = A @ A.t() + 5 * torch.eye(5); B = torch.rand(5, 7)
LD, P = torch.linalg.ldl_factor(A); LU, Q = torch.linalg.lu_factor(A)
ops = [lambda o: torch.linalg.ldl_solve(LD, P, B, out=o), lambda o: torch.linalg.lu_solve(LU, Q, B, out=o), lambda o: torch.lu_solve(B, LU, Q, out=o), lambda o: (torch.linalg.ldl_solve(LD, P, B), o.resize_(5, 7).copy_(torch.linalg.solve(A, B)))]
with torch.no_grad():
    for op in ops:
        expected = torch.empty(0)
        op(expected)
        for _ in range(60):
            o = torch.empty(0)
            vitrify.compile(lambda LD, P, LU, Q, B, o: (op(o), B + 1)[1])(LD, P, LU, Q, B, o)
            assert torch.equal(o, expected)
            vitrify.reset()
print("done")
"""


@pytest.mark.no_kernels("another process compiles")
def test_made_up_values_are_no_places():
    """LAPACK counts its pivots from one: of zeros it writes before its memory."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PIVOTS], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == "done", done.stderr
