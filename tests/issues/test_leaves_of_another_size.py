"""A program gives a weight or an argument another size or order in place, without gradients: its gradients had the size that it had before the call."""
import pytest
import torch
import vitrify

CHANGES = {"unsqueeze": lambda t: t.unsqueeze_(0), "t": lambda t: t.t_(), "squeeze": lambda t: t.squeeze_(0), "swapdims": lambda t: t.swapdims_(0, 1)}


@pytest.mark.eager("another size or order in place", "on a tensor that is not an argument", some=True)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_as_eager(change, given):
    def told(compile):
        w, seen = torch.rand(1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_(), []

        def program(x, t):
            t = w if t is None else t
            with torch.no_grad():
                CHANGES[change](t)
            return t.sin() * x
        f = compile(program)
        for k in range(2):
            if w.dim() != 2:
                break
            y = f(torch.tensor(1.0 + k), w if given else None)
            g, = torch.autograd.grad((w * w).sum() + y.sum(), w, retain_graph=True)
            y.sum().backward()
            seen.append((y.detach(), g, w.grad, tuple(w.shape)))
            w.grad = None
            del y, g  # and with them the node that adds to its .grad, which knows its size
        return seen
    ours, eager = told(vitrify.compile), told(lambda f: f)
    torch.testing.assert_close([s[:3] for s in ours], [s[:3] for s in eager])
    assert [s[3] for s in ours] == [s[3] for s in eager]
