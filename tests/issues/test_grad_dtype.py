"""Tensor.grad_dtype of an argument: the engine casts its gradient to that, or not at all. A compiled backward cast it to the argument's own dtype before."""
import pytest
import torch
import vitrify


class Up(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return w.float() * 1.5

    @staticmethod
    def backward(ctx, g):
        return g * 1.001


PROGRAMS = {"function": lambda w, x: Up.apply(w) * 1.003, "promoted": lambda w, x: w * x, "cast": lambda w, x: w.float() * 1.003, "own": lambda w, x: w.sin() * 1.5, "two": lambda w, x: (Up.apply(w) + w * x) * 1.003}


@pytest.mark.parametrize("how", ["argument", "captured"])
@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, None, torch.float32], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_dtype(name, dtype, hook, how):
    def told(compile):
        w, x, seen = torch.ones(3, dtype=torch.bfloat16, requires_grad=True), torch.tensor([1.001, 2.3, 0.7]), []
        w.grad_dtype = dtype
        if hook:
            w.register_hook(lambda g: seen.append((g.dtype, g.tolist())))
        f = compile(PROGRAMS[name]) if how == "argument" else compile(lambda x: PROGRAMS[name](w, x))
        for step in range(3):
            w.grad = None
            (f(w, x + step) if how == "argument" else f(x + step)).sum().backward()
            seen.append((w.grad.dtype, w.grad.tolist()))
        return seen
    assert told(lambda f: vitrify.compile(f, fullgraph=True)) == told(lambda f: f)
