"""What objects of Python's own library keep beside their items: the factory of a defaultdict, attributes of a partial and of an OrderedDict, the arguments and the
cause of an exception, the object behind a method of a slot. A later call read what they were before."""
from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict

import pytest
import torch
import vitrify

X = torch.linspace(-1, 1, 5)


def factory():
    d = defaultdict(lambda: 2.0)
    return (lambda x: x.sin() * d.default_factory()), lambda: setattr(d, "default_factory", lambda: 5.0)


def partial():
    p = functools.partial(torch.mul, other=2.0)
    p.k = 2.0
    return (lambda x: p(x).sin() * p.k), lambda: setattr(p, "k", 5.0)


def ordered():
    od = OrderedDict(a=1.0)
    od.z = 2.0
    return (lambda x: x.sin() * od.z * od["a"]), lambda: setattr(od, "z", 5.0)


def arguments():
    e = ValueError(2.0)
    return (lambda x: x.sin() * e.args[0]), lambda: setattr(e, "args", (5.0,))


def cause():
    class Own(Exception):
        pass
    e = Own()
    e.__cause__ = ValueError(2.0)
    return (lambda x: x.sin() * e.__cause__.args[0]), lambda: setattr(e, "__cause__", ValueError(5.0))


def attribute():
    e = ValueError()
    e.k = 2.0
    return (lambda x: x.sin() * e.k), lambda: setattr(e, "k", 5.0)


def length():
    items = [1]
    n = items.__len__
    return (lambda x: x.sin() * n()), lambda: items.append(2)


@pytest.mark.parametrize("make", [factory, partial, ordered, arguments, cause, attribute, length], ids=lambda f: f.__name__)
def test_changes_are_seen(make):
    f, change = make()
    compiled, before = vitrify.compile(f), vitrify.counters["kernels_launched"]
    for _ in range(3):
        assert torch.equal(compiled(X), f(X))
    assert vitrify.counters["kernels_launched"] >= before + 3
    then = f(X)
    change()
    assert not torch.equal(then, f(X))
    assert torch.equal(compiled(X), f(X))
