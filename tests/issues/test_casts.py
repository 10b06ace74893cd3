"""An integer that went through a float does not come back as its own low bits."""
import torch
import vitrify


def test_integers_through_floats_that_do_not_fit():
    x = torch.tensor([1, -7, 2**31 - 1, -(2**31), 2**31, 2**40 + 3, -(2**40) - 3, 2**62 + 5] * 9)

    def f(x):
        return x.double().to(torch.int32), x.float().to(torch.int32), x.double().to(torch.int64)
    before = vitrify.counters["kernels_launched"]
    ours, eager = vitrify.compile(f, fullgraph=True)(x), f(x)
    assert vitrify.counters["kernels_launched"] > before
    for a, b in zip(ours, eager):
        assert torch.equal(a, b), (a, b)
