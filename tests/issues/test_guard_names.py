"""A global that only shares its name with an attribute is not guarded: a list of times called `t` made every call of `x.t()` compile anew."""
import torch
import vitrify

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
