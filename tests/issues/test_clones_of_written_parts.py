"""A clone of an argument that is written in part has memory of its own: a complex one had that of ATen's copy of all memory that the argument is a part of."""
import pytest
import torch
import vitrify

WRITES = {"slice": lambda b: b[1:].add_(4), "row": lambda b: b[0].mul_(2), "diagonal": lambda b: b.diagonal().mul_(2)}


@pytest.mark.compiled("complex numbers are ATen's")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float32], ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_memory(write, dtype):
    def f(b):
        WRITES[write](b)
        r = b.clone()
        b.mul_(1)
        return r
    compiled = vitrify.compile(f)
    for _ in range(2):
        told = []
        for call in (f, compiled):
            s = torch.arange(1000).to(dtype)
            with torch.no_grad():
                r = call(s[16:32].view(4, 4))
            told.append((r, s, r.storage_offset(), r.untyped_storage().nbytes()))
        assert torch.equal(told[0][0], told[1][0]) and torch.equal(told[0][1], told[1][1]) and told[0][2:] == told[1][2:]
