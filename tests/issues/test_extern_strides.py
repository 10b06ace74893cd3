"""Strides along dimensions of size 1 are those of eager's kernel, also where its Meta kernel records others (nonzero_static of one row)."""
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
