"""A Function's backward that reads a weight by its name, or as an attribute of its ctx, beside what it has saved: nobody looks at that weight's version."""
import expects
import pytest
import torch
import vitrify

W = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)


class ByName(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * x.exp() * W


class AsAttribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.w = W
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * x.cos() * ctx.w


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, W)
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * x.exp() * W * w


class ASavedView(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, W[1:].detach())
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        x, part = ctx.saved_tensors
        return g * x.exp() * W * part.sum()


PROGRAMS = {
    "sum": lambda f, x: f(x + W), "product": lambda f, x: f(x * W), "detached": lambda f, x: f(x * 1 + W.detach()), "met behind it": lambda f, x: f(x * 2) * W.detach(),
    "computed once more": lambda f, x: f((x + W) * 1),
}
WRITES = {"op": lambda: torch.no_grad()(W.add_)(1.0), "data": lambda: W.data.add_(1.0), "nothing": lambda: None}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("function", [ByName, AsAttribute, Saved, ASavedView])
@pytest.mark.parametrize("program", PROGRAMS)
def test_written_in_between(program, function, write):
    if program in ("detached", "met behind it"):
        expects.eager("in a backward of its own that gives it no gradient")
    told = []
    for make in (vitrify.compile, lambda f: f):
        f, seen = make(lambda x: PROGRAMS[program](function.apply, x)), []
        for _ in range(3):
            W.data.copy_(torch.tensor([0.5, 1.0, 2.0]))
            W.grad, x = None, torch.full((2, 3), 0.75, dtype=torch.float64, requires_grad=True)
            y = f(x)
            WRITES[write]()
            try:
                y.sum().backward()
                seen.append((x.grad.tolist(), None if W.grad is None else W.grad.tolist()))
            except RuntimeError as e:
                seen.append(str(e).partition(": [torch")[0])
        told.append(seen)
    W.grad = None
    for a, b in zip(*told, strict=True):
        assert isinstance(a, str) == isinstance(b, str) and (a == b if isinstance(a, str) else True)
        if not isinstance(a, str):
            torch.testing.assert_close(torch.tensor(a[0]), torch.tensor(b[0]))
            assert (a[1] is None) == (b[1] is None)
            if a[1] is not None:
                torch.testing.assert_close(torch.tensor(a[1]), torch.tensor(b[1]))
