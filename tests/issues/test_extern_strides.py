"""Strides along dimensions of size 1 are those of eager's kernel, also where its Meta kernel records others (nonzero_static of one row)."""
import pytest
import torch
import vitrify


def test_strides_of_one_row():
    def f(x):
        return torch.nonzero_static(x, size=1), x + 1
    x = torch.ones(5, 5, 5)
    compiled = vitrify.compile(f)
    for _ in range(2):
        before = vitrify.counters["externs_called"]
        ours, theirs = compiled(x)[0], f(x)[0]
        assert vitrify.counters["externs_called"] == before + 1
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


@pytest.mark.compiled("rows of no coordinates have nothing to compute")
@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,), ()])
def test_what_follows_inherits_them(shape):
    def f(x, y):
        rows = torch.nonzero_static(x, size=4)
        return y[rows] * 2, rows.t()
    x, y = torch.ones(shape), torch.arange(6.0)
    compiled = vitrify.compile(f)
    for _ in range(2):
        before = dict(vitrify.counters)
        for ours, theirs in zip(compiled(x, y.add(1)), f(x, y.add(1))):
            assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
        assert vitrify.counters["externs_called"] > before["externs_called"] and vitrify.counters["fallbacks"] == before["fallbacks"]
        assert shape == () or vitrify.counters["kernels_launched"] > before["kernels_launched"]  # rows of no coordinates: nothing to compute
