"""Modules of the user's that a program holds as it holds objects: in a cell, a default, a list or an attribute. What they hold was taken for what never changes."""
import types

import numpy as np
import pytest
import torch
import vitrify
from torch import nn


def new():
    module = types.ModuleType("my_config")
    module.scale, module.unread = 2.0, 1.0
    module.weight = torch.full((2,), 3.0)
    return module


def in_a_cell():
    m = new()
    return m, lambda x: x * m.scale + m.weight


def in_a_default():
    m = new()

    def f(x, config=m):
        return x * config.scale + config.weight
    return m, f


def in_a_list():
    held = [new()]
    return held[0], lambda x: x * held[0].scale + held[0].weight


def in_an_attribute():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = new()

        def forward(self, x):
            return x * self.config.scale + self.config.weight
    net = Net()
    return net.config, net


@pytest.mark.parametrize("make", [in_a_cell, in_a_default, in_a_list, in_an_attribute])
def test_what_modules_hold(make, delta):
    config, f = make()
    compiled, x = vitrify.compile(f), torch.ones(2)
    assert torch.equal(compiled(x), f(x))
    config.scale = 5.0
    assert torch.equal(compiled(x), f(x))
    config.weight = torch.zeros(2)
    assert torch.equal(compiled(x), f(x))
    captures = delta.captures
    config.unread = 7.0
    assert torch.equal(compiled(x), f(x)) and delta.captures == captures and delta.eager_calls == 0


@pytest.mark.eager("an array of Python objects")
def test_arrays_of_objects():
    held = np.array([2.0, None], dtype=object)
    compiled = vitrify.compile(lambda x: x * held[0])
    assert compiled(torch.ones(1)).item() == 2
    held[0] = 5.0
    assert compiled(torch.ones(1)).item() == 5
