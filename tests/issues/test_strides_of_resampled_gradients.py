"""Gradients of resampling from channels-last memory, for which ATen's kernels and Meta's say different strides: those that follow from sizes are the kernels'."""
import pytest
import torch
import vitrify
from torch.nn.functional import interpolate

WAYS = [("nearest", 2, {}), ("nearest-exact", 2, {}), ("bilinear", 2, {}), ("bicubic", 2, {}), ("bilinear", 2, {"antialias": True}), ("bicubic", 2, {"antialias": True}),
        ("nearest", 3, {}), ("nearest-exact", 3, {}), ("trilinear", 3, {})]


@pytest.mark.no_kernels("gradients of resampling are calls of ATen", some=True)
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("layout", ["last", "contiguous"])
@pytest.mark.parametrize("mode, dims, more", WAYS, ids=lambda v: str(v))
def test_sizes_that_change(mode, dims, more, layout, dynamic, create_graph):
    def told(compile):
        f, seen = compile(lambda x: interpolate(x, scale_factor=1.5, mode=mode, **more)), []
        for n in (2, 3, 4, 5):
            x = torch.arange(n * 4 * 6.0 ** dims).sin().view(n, 4, *[6] * dims)
            if layout == "last":
                x = x.to(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
            x.requires_grad_()
            g, = torch.autograd.grad(f(x).square().sum(), x, create_graph=create_graph)
            seen += [g.stride(), g.detach()]
            if create_graph:
                seen += [torch.autograd.grad(g.sum(), x)[0]]
        return seen
    for ours, eager in zip(told(lambda f: vitrify.compile(f, fullgraph=True, dynamic=dynamic)), told(lambda f: f)):
        if isinstance(eager, tuple):
            assert ours == eager
        else:
            torch.testing.assert_close(ours, eager)
