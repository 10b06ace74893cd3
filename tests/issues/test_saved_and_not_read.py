"""A user's backward that does not look at what its forward has saved runs as often as it likes, as in eager."""
import pytest
import torch
import vitrify


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, g * x


class Scales(torch.autograd.Function):
    """Saves for a case that may be another."""
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2, (g * ctx.saved_tensors[0] if ctx.needs_input_grad[1] else None)


class Never(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx, g):
        return None, g


def steps(f, needs, write, twice):
    torch.manual_seed(0)
    x, w = torch.rand(3).requires_grad_(needs[0]), torch.rand(3).requires_grad_(needs[1])
    y = f(x, w)
    said = []
    if write:
        with torch.no_grad():
            w.add_(1), x.add_(1)
    for _ in range(2):
        try:
            given = torch.autograd.grad(y.sum(), [t for t in (x, w) if t.requires_grad], create_graph=twice, retain_graph=False, allow_unused=True)
            said += [g is not None and g.detach().clone() for g in given]
        except RuntimeError as e:
            said.append(str(e)[:40])
    return said


@pytest.mark.parametrize("around", [lambda f: f, lambda f: lambda x, w: f(x * 1, w * 1), lambda f: lambda x, w: f(x, w).exp()], ids=["alone", "behind others", "before others"])
@pytest.mark.parametrize("function", [Reads, Scales, Never], ids=lambda f: f.__name__)
def test_a_second_time(function, around):
    f = around(function.apply)
    for needs in ((True, True), (True, False), (False, True)):
        for write in (False, True):
            for twice in (False, True):
                compiled = vitrify.compile(lambda x, w: f(x, w))
                for a, b in zip(steps(compiled, needs, write, twice), steps(f, needs, write, twice), strict=True):
                    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                        torch.testing.assert_close(a, b)
                    else:
                        assert a == b, (needs, write, twice, a, b)
