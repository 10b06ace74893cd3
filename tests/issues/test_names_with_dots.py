"""Keys with dots, and other keys than names: what the door watches under them is watched as under any key. The name of what lay there was cut at the key's own dot."""
import numpy as np
import pytest
import torch
import vitrify
from torch import nn

KEYS = ["ab", "a.b", 0.5, "a]b", "it's", 'a"b', "a[0].b", (1, "a.b"), -1, ""]


class Held(nn.Module):
    def __init__(self, key, value, read):
        super().__init__()
        self.tables, self.key, self.read = {key: value}, key, read

    def forward(self, x):
        return self.read(self.tables[self.key], x)


@pytest.mark.eager("it can reach an iterator")
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_iterators(key):
    def read(it, x):
        return x * next(it) + 1
    module, x = vitrify.compile(Held(key, iter([1.0, 2.0, 3.0]), read)), torch.ones(3)
    assert [module(x)[0].item() for _ in range(3)] == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_large_arrays_written_in_place(key):
    table = np.ones(20000)
    module, x = vitrify.compile(Held(key, table, lambda t, x: x * float(t[0]) + 1)), torch.ones(3)
    for k in range(4):
        table[:] = k
        assert module(x)[0].item() == k + 1
