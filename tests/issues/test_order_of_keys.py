"""Loops over a dict take its keys in their order: one that is popped and put back is the last. Compiled calls went on in the old order."""
import pytest
import torch
import vitrify
from torch import nn


def turn(d):
    """Its first key becomes the last."""
    k = next(iter(d))
    v = d.pop(k)
    d[k] = v


class Values(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held

    def forward(self, x):
        for v in self.held.values():
            x = v(x) if callable(v) else (x + 1) * v
        return x


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.tensor(2.0))
        self.register_buffer("b", torch.tensor(3.0))

    def forward(self, x):
        for b in self.buffers():
            x = (x + 1) * b
        return x


TABLE = {"a": 2.0, "b": 3.0}


class Record:
    pass


RECORD = Record()
RECORD.a, RECORD.b = 2.0, 3.0


def of_a_global(x):
    for v in TABLE.values():
        x = (x + 1) * v
    return x


def of_attributes(x):
    for v in vars(RECORD).values():
        x = (x + 1) * v
    return x


def hooked():
    m = nn.Sequential(nn.Identity())
    m[0].register_forward_hook(lambda m, i, o: o + 1)
    m[0].register_forward_hook(lambda m, i, o: o * 3)
    return m


def programs():
    torch.manual_seed(0)
    row = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    named = Values(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ReLU()}))
    numbers = Values(nn.ParameterDict({"a": nn.Parameter(torch.tensor(2.0)), "b": nn.Parameter(torch.tensor(3.0))}))
    plain, buffers, hooks = Values({"a": 2.0, "b": 3.0}), Buffers(), hooked()
    return {
        "Sequential": (row, lambda: turn(row._modules)), "ModuleDict": (named, lambda: turn(named.held)),
        "ParameterDict": (numbers, lambda: turn(numbers.held)), "a dict of a module": (plain, lambda: turn(plain.held)),
        "buffers": (buffers, lambda: turn(buffers._buffers)), "hooks": (hooks, lambda: turn(hooks[0]._forward_hooks)),
        "a global": (of_a_global, lambda: turn(TABLE)), "attributes": (of_attributes, lambda: turn(vars(RECORD))),
    }


@pytest.mark.parametrize("name", programs())
def test_keys_in_another_order(name):
    f, reorder = programs()[name]
    compiled, x = vitrify.compile(f), torch.randn(3, 2)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), f(x))
            before = f(x)
            reorder()
            assert not torch.equal(f(x), before)
            torch.testing.assert_close(compiled(x), f(x))



@pytest.mark.eager("the order of")
def test_a_program_that_reorders():
    table = {"a": 2.0, "b": 3.0}

    def f(x):
        turn(table)
        for v in table.values():
            x = (x + 1) * v
        return x
    compiled = vitrify.compile(f)
    assert [compiled(torch.ones(1)).item() for _ in range(4)] == [14.0, 15.0, 14.0, 15.0] and list(table) == ["a", "b"]
