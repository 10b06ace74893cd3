"""Functions that are made from text have the globals they are given, which need no __name__; what wraps a library's function has its module's name."""
import functools

import pytest
import torch
import torch.nn.functional as F
import vitrify


def made(names, text):
    namespace = {"torch": torch, **names}
    exec(text, namespace)
    return namespace["f"], namespace


@pytest.mark.eager("it changes the requires_grad of a tensor")
def test_an_effect_on_what_it_finds():
    told = []
    for make in (vitrify.compile, lambda f: f):
        w, states = torch.ones(2, requires_grad=True), []
        f, _ = made({"w": w}, "def f(x):\n w.requires_grad_(False)\n return x * 2\n")
        f = make(f)
        for _ in range(3):
            f(torch.ones(2, requires_grad=True))
            states.append(w.requires_grad)
            w.requires_grad_(True)
        told.append(states)
    assert told[0] == told[1]


def test_a_number_that_changes():
    f, namespace = made({"scale": 2.0}, "def f(x):\n return x * scale\n")
    compiled, x = vitrify.compile(f), torch.ones(2)
    for scale in (2.0, 3.0, 2.0):
        namespace["scale"] = scale
        assert torch.equal(compiled(x), f(x))


SCALE = [1.0]
FACTOR = 1.0


@functools.wraps(F.relu)
def wrapped(x):
    return F.relu(x) * FACTOR + SCALE[0]


def test_what_wraps_a_function_of_torch():
    global FACTOR
    compiled, x = vitrify.compile(lambda x: wrapped(x) * 1), torch.ones(2)
    try:
        for factor, scale in ((1.0, 1.0), (2.0, 1.0), (2.0, 3.0)):
            FACTOR, SCALE[0] = factor, scale
            assert torch.equal(compiled(x), wrapped(x))
    finally:
        FACTOR, SCALE[0] = 1.0, 1.0
