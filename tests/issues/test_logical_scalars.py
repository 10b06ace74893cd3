"""Logical ops beside a 0-d operand of a wider type: eager converts it to the common type first, in which it may be zero."""
import itertools

import pytest
import torch
import vitrify

OPS = {"and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor, "turned": lambda x, v: torch.logical_and(v, x), "written": lambda x, v: x.clone().logical_xor_(v), "chosen": lambda x, v: torch.where(torch.logical_or(x, v), x, -x)}
PAIRS = [(torch.uint8, torch.int64, [256, 3, 0]), (torch.int8, torch.int32, [256, 255, 0]), (torch.int16, torch.int64, [65536, 1, 0]), (torch.int32, torch.int64, [2 ** 40, 7, 0]), (torch.float32, torch.float64, [1e-50, 1.0, 0.0]), (torch.float16, torch.float32, [1e-10, 2.0, 0.0]), (torch.bfloat16, torch.float64, [1e-45, 1.0, 0.0]),
         (torch.bool, torch.int64, [256, 0, 1]), (torch.float32, torch.int64, [3, 0, 1]), (torch.int64, torch.bool, [True, False, True])]


@pytest.mark.parametrize("dtype, wide, values", PAIRS, ids=[f"{a} {b}" for a, b, _ in PAIRS])
@pytest.mark.parametrize("name", OPS)
def test_logical(name, dtype, wide, values):
    if name == "chosen" and dtype == torch.bool:
        f = lambda x, v: torch.where(torch.logical_or(x, v), x, ~x)  # noqa: E731
    else:
        f = OPS[name]
    compiled = vitrify.compile(f, fullgraph=True)
    with torch.no_grad():
        for value in itertools.chain(values, values):
            x, v = torch.tensor([3, 0, 1, 0]).to(dtype), torch.tensor(value, dtype=wide)
            ours, eager = compiled(x, v), f(x, v)
            assert ours.dtype == eager.dtype and torch.equal(ours, eager)
