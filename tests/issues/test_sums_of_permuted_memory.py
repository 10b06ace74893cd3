"""A sum of all elements is as exact of memory in another order of dims as of contiguous memory: there too it is added up by lanes, not in one chain."""
import math

import pytest
import torch
import vitrify

ORDERS = {"contiguous": (0, 1, 2), "swapped": (0, 2, 1), "reversed": (2, 1, 0)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("f", [lambda x: x.sum(), lambda x: (x * 2).sum() / 2], ids=["alone", "fused"])
def test_sums(f, order):
    numbers = torch.randn(256000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = numbers.view(64, 40, 100).permute(ORDERS[order])
    exact = math.fsum(numbers.tolist())
    bound = 0.02 * torch.finfo(x.dtype).eps * x.abs().sum().item()  # one chain of each of 16 parts is off by 0.12 of that
    assert abs(f(x).item() - exact) < bound and abs(vitrify.compile(f)(x).item() - exact) < bound


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("f", [lambda x: x.amax(), lambda x: x.prod(), lambda x: x.var(), lambda x: x.sum((1, 2)), lambda x: x.mean((0, 2))], ids=["amax", "prod", "var", "of rows", "of columns"])
def test_other_reductions(f, order):
    x = (torch.randn(3 * 50 * 70, generator=torch.Generator().manual_seed(2)) / 1000 + 1).view(3, 50, 70).permute(ORDERS[order])
    torch.testing.assert_close(vitrify.compile(f)(x), f(x))
