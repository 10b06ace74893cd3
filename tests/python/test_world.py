"""Whatever a program can reach is changed between two calls: the second call must see it (and a change of something else must cost nothing)."""
import argparse
import collections
import functools
import types

import pytest
import torch
import vitrify
from helpers import same
from torch import nn

X = torch.linspace(-1, 1, 6).reshape(2, 3)


class Meta(type):
    level = 1.0


class Config(metaclass=Meta):
    shared = 1.0

    def __init__(self):
        self.k, self.items, self.by_name = 1.0, [1.0, 2.0], {"a": 1.0}
        self.order = collections.OrderedDict(a=1.0, b=2.0)
        self.queue, self.names, self.inner = collections.deque([1.0]), {"a"}, types.SimpleNamespace(k=1.0)

    @property
    def doubled(self):
        return self.k * 2

    def method(self, x):
        return x * self.shared

    def __len__(self):
        return len(self.items)


class Other(Config):
    def method(self, x):
        return x - 7


class Slotted:
    __slots__ = ("k",)


def default(x, k=1.0, *, j=1.0, box=[1.0]):
    return x * k + j + box[0]


def make_world():
    w = types.SimpleNamespace(config=Config(), slotted=Slotted(), tensor=torch.ones(3), module=nn.Linear(3, 3), default=types.FunctionType(default.__code__, globals(), "default", (1.0, [1.0])), cell=1.0)
    w.default = types.FunctionType(default.__code__, globals(), "default", default.__defaults__)
    w.default.__kwdefaults__ = {"j": 1.0, "box": [1.0]}
    w.slotted.k = 1.0
    cell, config, slotted, module, function = w.cell, w.config, w.slotted, w.module, w.default

    def change_cell(v):
        nonlocal cell
        cell = v

    def program(x):
        y = config.method(x) * config.k + sum(config.items) + config.by_name.get("b", 0.0) + next(iter(config.order.values())) * 3
        y = y + config.queue[0] + ("b" in config.names) + config.inner.k + config.doubled + len(config) + Config.level + type(config).shared
        y = y * 3 + slotted.k + function(x) + cell + GLOBAL["k"] + hasattr(config, "late")
        return module(y) * (2 if module.training else 3) * w.tensor

    w.program, w.change_cell = program, change_cell
    return w


GLOBAL = {"k": 1.0}

CHANGES = {
    "an attribute": lambda w: setattr(w.config, "k", 5.0),
    "a new attribute": lambda w: setattr(w.config, "late", 5.0),
    "a class attribute": lambda w: setattr(Config, "shared", 5.0),
    "a class attribute twice": lambda w: (setattr(Config, "shared", 6.0), setattr(Config, "shared", 7.0)),
    "an instance over the class": lambda w: setattr(w.config, "shared", 5.0),
    "an attribute of the metaclass": lambda w: setattr(Meta, "level", 5.0),
    "a method": lambda w: setattr(Config, "method", lambda self, x: x - 3),
    "a method of one object": lambda w: setattr(w.config, "method", lambda x: x - 4),
    "a property": lambda w: setattr(Config, "doubled", property(lambda self: 9.0)),
    "the class of an object": lambda w: setattr(w.config, "__class__", Other),
    "the __dict__ of an object": lambda w: setattr(w.config, "__dict__", {**w.config.__dict__, "k": 8.0}),
    "__dict__ written to": lambda w: w.config.__dict__.update(k=9.0),
    "__len__": lambda w: setattr(Config, "__len__", lambda self: 11),
    "an element of a list": lambda w: w.config.items.__setitem__(0, 5.0),
    "the length of a list": lambda w: w.config.items.append(5.0),
    "a key of a dict": lambda w: w.config.by_name.__setitem__("b", 5.0),
    "the order of a dict": lambda w: w.config.order.move_to_end("a"),
    "a deque": lambda w: w.config.queue.appendleft(5.0),
    "a set": lambda w: w.config.names.add("b"),
    "a namespace": lambda w: setattr(w.config.inner, "k", 5.0),
    "a slot": lambda w: setattr(w.slotted, "k", 5.0),
    "a cell": lambda w: w.change_cell(5.0),
    "a global dict": lambda w: GLOBAL.__setitem__("k", 5.0),
    "a global": lambda w: globals().__setitem__("GLOBAL", {"k": 6.0}),
    "the code of a function": lambda w: setattr(w.default, "__code__", (lambda x, k=1.0, *, j=1.0, box=None: x - 5).__code__),
    "defaults": lambda w: setattr(w.default, "__defaults__", (5.0,)),
    "keyword defaults": lambda w: setattr(w.default, "__kwdefaults__", {"j": 5.0, "box": [1.0]}),
    "one keyword default": lambda w: w.default.__kwdefaults__.__setitem__("j", 6.0),
    "inside a default": lambda w: w.default.__kwdefaults__["box"].__setitem__(0, 7.0),
    "a tensor": lambda w: setattr(w, "tensor", torch.full((3,), 5.0)),
    "the contents of a tensor": lambda w: w.tensor.fill_(5.0),
    "the data of a tensor": lambda w: setattr(w.tensor, "data", torch.full((3,), 6.0)),
    "a parameter": lambda w: setattr(w.module, "weight", nn.Parameter(torch.ones(3, 3))),
    "the data of a parameter": lambda w: setattr(w.module.weight, "data", torch.ones(3, 3)),
    "eval()": lambda w: w.module.eval(),
    "the class of a module": lambda w: setattr(w.module, "__class__", type("L", (nn.Linear,), {"forward": lambda self, x: x - 9})),
    "a hook": lambda w: w.module.register_forward_hook(lambda m, i, o: o + 5),
    "a forward of its own": lambda w: setattr(w.module, "forward", lambda x: x + 6),
}


@pytest.fixture(autouse=True)
def untouched():
    before = {o: dict(vars(o)) for o in (Config, Meta)}
    k, g = GLOBAL["k"], GLOBAL
    yield
    for o, attributes in before.items():
        for name, v in attributes.items():
            if not name.startswith("__") or name == "__len__":
                setattr(o, name, v)
    globals()["GLOBAL"] = g
    GLOBAL["k"] = k


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name, delta, no_warnings):
    w = make_world()
    compiled = vitrify.compile(w.program, options={"recompile_limit": 16})
    with torch.no_grad():
        for _ in range(2):
            same(compiled(X), w.program(X))
        assert delta.captures == 1
        before = w.program(X)
        CHANGES[name](w)
        after = w.program(X)
        assert not torch.equal(before, after), "the change shows"
        for _ in range(2):
            same(compiled(X), after)
    assert delta.eager_calls == 0 and delta.kernels_launched > 0 and delta.captures <= 2


class Pair(collections.namedtuple("Pair", "items k")):
    pass


class OwnList(list):
    k = 1.0


REACHED = {
    "a namespace of argparse": (argparse.Namespace(k=1.0), lambda o: o.k, lambda o: setattr(o, "k", 5.0)),
    "a default dict": (collections.defaultdict(float, k=1.0), lambda o: o["k"], lambda o: o.update(k=5.0)),
    "a counter": (collections.Counter("aab"), lambda o: o["a"], lambda o: o.update("a")),
    "a list in a named tuple": (Pair([1.0], 2.0), lambda o: sum(o.items) + o.k, lambda o: o.items.append(5.0)),
    "an element of a list's subclass": (OwnList([1.0]), lambda o: sum(o) + o.k, lambda o: o.append(5.0)),
    "an attribute of a list's subclass": (OwnList([1.0]), lambda o: sum(o) + o.k, lambda o: setattr(o, "k", 5.0)),
    "what a partial function calls": (functools.partial(lambda box: box[0], [1.0]), lambda o: o(), lambda o: o.args[0].__setitem__(0, 5.0)),
    "a UserDict": (collections.UserDict(k=1.0), lambda o: o["k"], lambda o: o.update(k=5.0)),
}


@pytest.mark.parametrize("name", REACHED)
def test_a_change_inside_is_seen(name, delta, no_warnings):
    o, read, change = REACHED[name]
    f = vitrify.compile(lambda x: x * read(o))
    same(f(X), X * read(o))
    change(o)
    for _ in range(2):
        same(f(X), X * read(o))
    assert delta.captures == 2 and delta.eager_calls == 0


def test_changes_of_other_things_cost_nothing(delta, no_warnings):
    w = make_world()
    compiled = vitrify.compile(w.program)
    with torch.no_grad():
        for i in range(5):
            same(compiled(X), w.program(X))
            globals()["UNRELATED"] = i
            GLOBAL["k"] = GLOBAL["k"]
            w.config.k = w.config.k
            w.config.items[0] = w.config.items[0]
            w.module.train()
    assert delta.captures == 1 and delta.eager_calls == 0
