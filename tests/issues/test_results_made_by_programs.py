"""What a result holds beside tensors, where the program makes it: slices, functions, classes, sets, keys of dicts. Some were those of the capture, with its sizes and placeholders."""
import json

import expects
import pytest
import torch

import vitrify


def shared(x):
    return x * 5


class Held:
    pass


def counts(x):
    def g():
        g.count += 1
        return g.count
    g.count = 0
    return x * 2, g


def with_class(x):
    class Box:
        items = []
    return x * 2, Box


COMPILED = {
    "a slice": lambda x: (x * 2, slice(0, x.shape[0])),
    "a slice of floats": lambda x: (x * 2, [slice(x.shape[0] / 2, None, 1)]),
    "keys": lambda x: {x.shape[0]: x * 2, (x.shape[0], "a"): x + 1, x.shape[0] / 2: x, "b": x},
    "a set of numbers": lambda x: (x * 2, frozenset([1, "a", (2, None)])),
    "a set of sizes": lambda x: (x * 2, frozenset([x.shape[0]])),
    "a function of the module": lambda x: (x * 2, shared),
    "a class of the module": lambda x: (x * 2, Held, torch.relu, len),
}
MADE = {
    "a set of tensors": (lambda x: frozenset([x * 2]), "frozenset"),
    "a function": (lambda x: (x * 2, lambda: x.shape[0]), "an object of type function"),
    "a function of a tensor": (lambda x: (lambda y: lambda g: g * y)(x * 2), "an object of type function"),
    "a function that counts": (counts, "an object of type function"),
    "a class": (with_class, "an object of type type"),
    "a method of a tensor": (lambda x: (x * 2).sum, "an object of type builtin_function_or_method"),
    "a method of a list": (lambda x: [x + 1].__getitem__, "an object of type builtin_function_or_method"),
}


def plain(v):
    if isinstance(v, dict):
        return {k: (type(k), plain(e)) for k, e in v.items()}
    if isinstance(v, (tuple, list)):
        return [plain(e) for e in v]
    if isinstance(v, frozenset):
        return {(type(e), e) for e in v}
    return v.tolist() if isinstance(v, torch.Tensor) else v


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", COMPILED)
def test_each_call_gives_its_own(name, dynamic):
    f = COMPILED[name]
    compiled = vitrify.compile(f, dynamic=dynamic)
    for n in (3, 5, 7, 9):
        x = torch.ones(n)
        assert plain(compiled(x)) == plain(f(x))


def test_keys_are_numbers():
    assert json.dumps({k: 1 for k in vitrify.compile(COMPILED["keys"], dynamic=True)(torch.ones(4)) if not isinstance(k, tuple)}) == '{"4": 1, "2.0": 1, "b": 1}'


@pytest.mark.parametrize("name", MADE)
def test_what_the_program_makes_is_left_to_it(name):
    f, why = MADE[name]
    expects.eager(why)
    compiled = vitrify.compile(f, dynamic=True)
    for n in (3, 5, 7):
        result = compiled(torch.ones(n))
        made = result[-1] if isinstance(result, tuple) else result
        if name == "a function":
            assert made() == n
        elif name == "a function of a tensor":
            assert made(torch.ones(n)).tolist() == [2.0] * n
        elif name == "a function that counts":
            assert made() == 1
        elif name == "a class":
            made.items.append(1)
            assert made.items == [1]
        elif name == "a method of a tensor":
            assert made().item() == 2 * n
        elif name == "a method of a list":
            assert made(0).tolist() == [2.0] * n
        else:
            assert next(iter(made)).tolist() == [2.0] * n
