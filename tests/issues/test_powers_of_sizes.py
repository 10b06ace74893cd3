"""Index expressions with symbolic sizes stay within 64 bits: powers of sizes did not, where views of views were composed many times over."""
import pytest
import torch
import vitrify


@pytest.mark.parametrize("times", [1, 2, 3, 7, 8, 12, 24])
def test_transposes_of_large_tensors(times):
    def fn(x):
        for _ in range(times):
            x = x.transpose(0, 1).reshape(x.shape)
        return x.reshape(-1)[:50] * 2
    compiled = vitrify.compile(fn, dynamic=True)
    for sizes in ((5, 7), (130, 1030), (1000, 1000), (3, 70001), (70001, 3)):
        x = torch.arange(sizes[0] * sizes[1], dtype=torch.int32).view(sizes)
        assert torch.equal(compiled(x), fn(x))


def test_windows_and_rolls():
    def fn(x):
        for _ in range(9):
            x = x.transpose(1, 2).reshape(x.shape).roll((1, 1), (1, 2))
        return x.reshape(-1)[:50] * 2
    compiled = vitrify.compile(fn, dynamic=True)
    for sizes in ((2, 5, 7), (3, 300, 257), (2, 1000, 90)):
        x = torch.arange(sizes[0] * sizes[1] * sizes[2], dtype=torch.int32).view(sizes)
        assert torch.equal(compiled(x), fn(x))
