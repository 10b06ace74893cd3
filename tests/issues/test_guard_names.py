"""A global that only shares its name with an attribute is not guarded: a list of times called `t` made every call of `x.t()` compile anew."""
import dis
import types

import pytest
import torch
import vitrify
from vitrify._sources import global_names

t = []
scale = 2.0


def transposed(x, y):
    return (x.t() + y.t()).contiguous()


def scaled(x):
    return x * scale


def through_string(x):
    return x * globals()["scale"]


def test_an_attribute_is_no_global():
    compiled = vitrify.compile(transposed)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    before = dict(vitrify.counters)
    for i in range(4):
        t.append(i)
        torch.testing.assert_close(compiled(x, y), transposed(x, y))
    assert vitrify.counters["captures"] == before["captures"] + 1
    assert vitrify.counters["kernels_launched"] == before["kernels_launched"] + 4


def test_a_global_still_is(monkeypatch):
    x = torch.randn(16)
    for fn in (scaled, through_string):
        compiled = vitrify.compile(fn)
        torch.testing.assert_close(compiled(x), x * 2)
        launched = vitrify.counters["kernels_launched"]
        monkeypatch.setitem(globals(), "scale", 3.0)
        torch.testing.assert_close(compiled(x), x * 3)
        assert vitrify.counters["kernels_launched"] == launched + 1
        monkeypatch.setitem(globals(), "scale", 2.0)


@pytest.mark.no_kernels("only the code is looked at")
def test_globals_are_those_that_the_disassembler_names():
    """Also names beyond the 256th, whose place takes an extended argument, and those of code within code."""
    source = "def f(x):\n    global w\n" + "".join(f"    x = x.a{i} + g{i}\n" for i in range(300)) + "    w = [(lambda: inner)() for _ in x]\n    del w\n    return x\n"
    scope = {}
    exec(source, scope)

    def named(code):
        own = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL")}
        return own.union(*(named(c) for c in code.co_consts if isinstance(c, types.CodeType)))

    found = global_names(scope["f"].__code__)
    assert found == named(scope["f"].__code__)
    assert found == {f"g{i}" for i in range(300)} | {"w", "inner"}
