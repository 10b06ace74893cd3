"""Kernels that trust integers to be places in memory are never run on made-up ones: LAPACK wrote where a pivot of zero said, and the process died."""
import pytest
import torch

import vitrify
from tests import bounds

SIZES = [(1, 1), (5, 2), (40, 3), (64, 64)]


def data(n, dtype):
    a = torch.randn(n, n, dtype=dtype, generator=torch.Generator().manual_seed(n))
    return a @ a.mH + n * torch.eye(n, dtype=dtype)


def solve_ldl(a, b):
    LD, pivots = torch.linalg.ldl_factor(a)
    return (lambda LD, p, b: torch.linalg.ldl_solve(LD, p, b * 2) + 1), (LD, pivots, b)


def solve_lu(a, b):
    LU, pivots = torch.linalg.lu_factor(a)
    return (lambda LU, p, b: torch.linalg.lu_solve(LU, p, b * 2) + 1), (LU, pivots, b)


def unpack_lu(a, b):
    LU, pivots = torch.linalg.lu_factor(a)
    return (lambda LU, p: sum(torch.lu_unpack(LU, p)) * 2), (LU, pivots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("n,k", SIZES)
@pytest.mark.parametrize("make", [solve_ldl, solve_lu, unpack_lu])
def test_pivots(make, n, k, dtype):
    f, args = make(data(n, dtype), torch.randn(n, k, dtype=dtype))
    want = f(*args)
    for _ in range(20):  # what is written beside memory is met later
        torch.testing.assert_close(vitrify.compile(f)(*args), want, **bounds.DEEP)
