"""What a program returns of objects that were there before it ran is those very objects, as in eager."""
import collections
import warnings

import pytest
import torch
import vitrify
from torch import nn

GLOBAL = [1, 2]
Pair = collections.namedtuple("Pair", "a b")


class Thing:
    pass


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("n", torch.zeros(()))
        self.empty, self.list, self.nested, self.dict = [], [self.w, 1, "a"], [[torch.zeros(3)], {"k": (1, [2])}], {"a": self.n}
        self.pair, self.ordered, self.default, self.set, self.queue = Pair(1, [2]), collections.OrderedDict(a=1), collections.defaultdict(list), {1, 2}, collections.deque([1])
        self.thing, self.layers, self.tuple = Thing(), nn.ModuleList([nn.Linear(3, 3)]), (self.w, [1])


class Returns(Holds):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return x * self.w, self.what(self)


OWNED = {
    "empty list": lambda m: m.empty, "list of a parameter": lambda m: m.list, "nested": lambda m: m.nested, "inner": lambda m: m.nested[1]["k"][1], "dict": lambda m: m.dict, "namedtuple": lambda m: m.pair, "in it": lambda m: m.pair.b,
    "OrderedDict": lambda m: m.ordered, "defaultdict": lambda m: m.default, "set": lambda m: m.set, "deque": lambda m: m.queue, "object": lambda m: m.thing, "ModuleList": lambda m: m.layers, "module": lambda m: m.layers[0],
    "tuple": lambda m: m.tuple, "parameters": lambda m: m._parameters, "buffers": lambda m: m._buffers, "global": lambda m: GLOBAL, "parameter": lambda m: m.w, "buffer": lambda m: m.n,
}


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", OWNED)
def test_it_is_the_object(name, grad):
    m = Returns(OWNED[name])
    compiled = vitrify.compile(m)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            y, owned = compiled(torch.ones(3))
            assert owned is OWNED[name](m) and y.requires_grad == grad
    assert vitrify.counters["compiled_calls"] == 3 and vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0


def test_of_closures_and_defaults():
    kept = [torch.ones(2), 3]

    def fn(x, more=[4], *, named={"a": [5]}):  # noqa: B006
        return {"kept": kept, "more": more, "named": named["a"], "made": [x * 2, kept]}
    compiled = vitrify.compile(fn)
    for _ in range(3):
        out = compiled(torch.ones(3))
        assert out["kept"] is kept is out["made"][1] and out["more"] is fn.__defaults__[0] and out["named"] is fn.__kwdefaults__["named"]["a"]
    assert vitrify.counters["compiled_calls"] == 3 and vitrify.counters["kernels_launched"] > 0


def test_what_it_holds_may_change_between_calls():
    """The guards see it; the object stays the same."""
    m = Returns(lambda m: m.list)
    compiled = vitrify.compile(m)
    for k in range(4):
        m.list.append(k)
        y, owned = compiled(torch.ones(3))
        assert owned is m.list and owned[-1] == k
    assert vitrify.counters["kernels_launched"] > 0


@pytest.mark.eager("it writes Python state on every call: self.dict.y", "it writes Python state, as caches do at first: self.dict.y")
def test_written_and_returned():
    """A program that writes it runs eagerly."""
    class Caches(Holds):
        def forward(self, x):
            self.dict["y"] = x * self.w
            return self.dict
    m = Caches()
    compiled = vitrify.compile(m)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in range(4):
            assert compiled(torch.full((3,), float(k))) is m.dict
            torch.testing.assert_close(m.dict["y"], torch.full((3,), float(k)))


@pytest.mark.parametrize("how", ["attribute", "module", "tuple", "closure", "in place", "each other"])
def test_a_module_that_calls_its_own_twin(how):
    class Recursive(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.me = nn.Parameter(torch.full((3,), 2.0)), None

        def forward(self, x, n=2):
            return x * self.w if n == 0 else (twin if how == "closure" else self.me[0] if how == "tuple" else self.me)(x.sin(), n - 1)
    m = Recursive()
    twin = vitrify.compile_(m) if how == "in place" else vitrify.compile(m)
    if how == "module":
        m.me = twin
    elif how == "tuple":
        m.me = (twin,)
    elif how == "each other":
        other = Recursive()
        m.__dict__["me"], other.__dict__["me"] = vitrify.compile(other), twin
    else:
        m.__dict__["me"] = twin
    for n in (0, 1, 2, 2, 3):
        x = torch.linspace(0.1, 1, 3, requires_grad=True)
        (g,) = torch.autograd.grad(twin(x, n).sum(), x)
        y = x
        for _ in range(n):
            y = y.sin()
        torch.testing.assert_close(g, torch.autograd.grad((y * 2).sum(), x)[0])
    assert vitrify.counters["compiled_calls"] > 0 and vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0
