"""What a gradient needs that is asked for by itself, and the gradients of all results do not: numbers that the forward drew, and what was computed of other inputs. It was
not kept: numbers were drawn again, others than the forward's, and inputs were called written to."""
import pytest
import torch
import torch.nn.functional as F
import vitrify


class Noise(torch.autograd.Function):
    """Its formula reads what it drew where the first result has no gradient."""

    @staticmethod
    def forward(ctx, x, saved):
        ctx.set_materialize_grads(False)
        noise = torch.rand_like(x)
        ctx.saved = saved
        if saved:
            ctx.save_for_backward(noise)
        else:
            ctx.noise = noise
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        noise = ctx.saved_tensors[0] if ctx.saved else ctx.noise
        return (b * noise if a is None else a * 2), None


def sign(x):
    """No gradient comes out of its derivative."""
    return torch.linalg.slogdet(x)[0] * 0.5


PROGRAMS = {
    "dropout": lambda x, c: (lambda s: (s, F.dropout(s, 0.3)))(sign(x)),
    "noise": lambda x, c: (lambda s: (s, s * torch.rand_like(s), s.cos()))(sign(x)),
    "another input": lambda x, c: (lambda s: (s, s * c.exp().exp()))(sign(x)),
    "another input, written": lambda x, c: (lambda s, e: (s, s * e, c.add_(1))[:2])(sign(x), c.exp().exp()),
    "own formula": lambda x, c: Noise.apply(x.flatten(), True),
    "own formula, attribute": lambda x, c: Noise.apply(x.flatten(), False),
}


@pytest.mark.no_kernels("some are library calls and what is drawn", some=True)
@pytest.mark.parametrize("how", ["hooks", "inner", "second", "retained", "deep"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_by_themselves(name, how):
    runs = []
    for f in (PROGRAMS[name], vitrify.compile(PROGRAMS[name], fullgraph=True)):
        torch.manual_seed(0)
        seen = []
        for _ in range(2):
            x, c = torch.randn(40, 3, 3, requires_grad=True), torch.randn(40)
            out = f(x, c)
            if how == "hooks":
                for t in out:
                    t.register_hook(lambda g: (seen.append(g), None if g is None else g * 2)[1])
                (out[1] * 3).sum().backward()
            elif how == "inner":
                seen.append(torch.autograd.grad(out[1].sum(), out[0], allow_unused=True)[0])
            elif how == "second":
                out[1].sum().backward()
            elif how == "retained":
                out[0].retain_grad()
                out[1].sum().backward()
                seen.append(out[0].grad)
            else:
                at = x if "own" in name else out[0]
                g = torch.autograd.grad(out[1].square().sum(), at, create_graph=True)[0]
                seen += [g, torch.autograd.grad(g.sum(), at, allow_unused=True)[0]]
            seen += [x.grad, torch.rand(1)]
        runs.append(seen)
    assert [g is None for g in runs[0]] == [g is None for g in runs[1]]
    torch.testing.assert_close([g for g in runs[1] if g is not None], [g for g in runs[0] if g is not None])
