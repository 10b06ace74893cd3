"""A custom op that is given a tensor may keep where it lies, and write there later by no call that anybody sees: what was made of it before is not used then."""
import ctypes

import expects
import pytest
import torch
import vitrify
from vitrify import _C

AT = []


@torch.library.custom_op("watches_that_end::keeps", mutates_args=())
def keeps(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    AT.append(_C.address(w))
    return x + 1


@keeps.register_fake
def _(x, w):
    return torch.empty_like(x)


def linear():
    m, x = torch.nn.Linear(256, 512), torch.randn(4, 256)
    return lambda x: (m(x), keeps(x, m.weight)), x, ctypes.c_float, 5.0


def convolution():
    m, x = torch.nn.Conv2d(16, 16, 3), torch.randn(2, 16, 12, 12)
    return lambda x: (m(x), keeps(x, m.weight)), x, ctypes.c_float, 5.0


def edges():
    e, x = torch.randint(0, 50, (2, 700)), torch.randn(60, 8)
    return lambda x: (torch.zeros(60, 8).scatter_add(0, e[1].view(-1, 1).expand(700, 8), x.index_select(0, e[0])), keeps(x, e)), x, ctypes.c_int64, 3


@pytest.mark.parametrize("make", [linear, convolution, edges], ids=lambda make: make.__name__)
def test_a_write_by_address(make):
    if make is not linear:
        expects.compiled("it consists of library calls")
    torch.manual_seed(0)
    f, x, number, value = make()
    compiled = vitrify.compile(f)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), f(x))
        (number * 64).from_address(AT[-1])[:] = [value] * 64
        torch.testing.assert_close(compiled(x), f(x))
