"""A Function that is given a captured tensor which no op reads, and gives it a gradient: nobody followed it there, and the weight did not train."""
import expects
import pytest
import torch
import vitrify
from torch import nn


class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2, g.sum(0)


class Shaped(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        return x * w.shape[0]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, g):
        return g * 2, g.sum(0) * 3


PROGRAMS = {"alone": lambda x, w: Fn.apply(x, w), "behind": lambda x, w: Fn.apply(x * 1.5, w) * 2, "shape": lambda x, w: Shaped.apply(x, w).sin(), "twice": lambda x, w: Fn.apply(Fn.apply(x, w), w)}


def told(compile, program, w, step=lambda: None):
    f, seen = compile(program), []
    for k in range(3):
        x = torch.full((3, 2), 1.0 + k, requires_grad=True)
        f(x).sum().backward(retain_graph=True)
        seen.append((x.grad.tolist(), [round(v, 4) for v in w.grad.tolist()]))
    return seen


@pytest.mark.parametrize("of", ["leaf", "made of a leaf", "module"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_captured(name, of):
    if name != "shape":  # which has saved it
        expects.eager("no op of it reads")

    def both(compile):
        w = nn.Parameter(torch.ones(2))
        if of == "module":
            m = nn.Module()
            m.w = w
            return told(compile, lambda x: PROGRAMS[name](x, m.w), w)
        h = w * 2 if of == "made of a leaf" else w
        return told(compile, lambda x: PROGRAMS[name](x, h), w)
    for ours, eager in zip(both(vitrify.compile), both(lambda f: f), strict=True):
        torch.testing.assert_close([torch.tensor(t) for t in ours], [torch.tensor(t) for t in eager])


@pytest.mark.parametrize("of", ["leaf", "made of a leaf"])
def test_what_an_op_reads_too(of):
    def both(compile):
        w = nn.Parameter(torch.ones(2))
        h = w * 2 if of == "made of a leaf" else w
        return told(compile, lambda x: Fn.apply(x * 1.5, h) * h, w)
    assert both(lambda f: vitrify.compile(f, fullgraph=True)) == both(lambda f: f)
