"""A leaf whose gradient is what several calls, or the caller, were given has memory of its own: eager's leaf copies what another node still holds."""
import pytest
import torch
import vitrify
from torch import nn

WITHIN = {"nothing": lambda y: y, "view": lambda y: y.view(6), "transposed": lambda y: y.t(), "unsqueezed": lambda y: y[None], "twice": lambda y: y.view(6)[None]}
OUTSIDE = {"nothing": lambda y: y, "view": lambda y: y.reshape(-1), "transposed": lambda y: y.mT if y.dim() > 1 else y, "unsqueezed": lambda y: y[None]}
PROGRAMS = {"sin": lambda x, w: x.sin() + w, "three": lambda x, w: x.sin() + w + x.cos(), "product": lambda x, w: x @ x.t() @ x + w, "cloned": lambda x, w: x.sin() + w.clone()}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_calls(name, within, outside):
    def told(compile):
        f = compile(lambda x, w: WITHIN[within](PROGRAMS[name](x, w)))
        x, w, v = torch.full((2, 3), 0.5, requires_grad=True), torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
        seen = []
        for _ in range(2):
            (OUTSIDE[outside](f(x, w)) + OUTSIDE[outside](f(x, v))).square().sum().backward()
            seen += [w.grad.clone(), v.grad.clone(), x.grad.clone()]
        total = torch.nn.utils.clip_grad_norm_([w, v], 1.0)
        return [*seen, total, w.grad, v.grad], w.grad.data_ptr() == v.grad.data_ptr()
    (ours, one), (eager, same) = (told(c) for c in (lambda f: vitrify.compile(f, fullgraph=True), lambda f: f))
    assert one == same == False  # noqa: E712
    for a, b in zip(ours, eager):
        torch.testing.assert_close(a, b)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_tangent_given_again(name, within, outside):
    """Nothing writes to the tensor that the caller gives, nor to what a hook has kept."""
    def told(compile):
        f, kept = compile(lambda x, w: WITHIN[within](PROGRAMS[name](x, w))), []
        x, w = torch.full((2, 3), 0.5, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
        t = None
        for _ in range(3):
            y = f(x, w)
            y.register_hook(kept.append)
            y = OUTSIDE[outside](y)
            t = torch.ones(y.shape) if t is None else t
            y.backward(t)
        return w.grad, t, *kept
    for a, b in zip(told(lambda f: vitrify.compile(f, fullgraph=True)), told(lambda f: f)):
        torch.testing.assert_close(a, b)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.pos, self.other = nn.Linear(4, 4), nn.Parameter(torch.zeros(2, 3, 4)), nn.Parameter(torch.zeros(2, 3, 4))

    def forward(self, x):
        return (self.lin(x) + self.pos).transpose(1, 2), (self.lin(x * 2) + self.other).transpose(1, 2)


def test_two_results():
    x = torch.arange(24.0).view(2, 3, 4) / 24

    def told(compile):
        torch.manual_seed(0)
        m = Block()
        f = compile(m)
        for _ in range(2):
            a, b = f(x)
            (a + b).square().sum().backward()
        before = [m.pos.grad.clone(), m.other.grad.clone()]
        return *before, torch.nn.utils.clip_grad_norm_([m.pos, m.other], 1.0), m.pos.grad, m.other.grad
    for a, b in zip(told(lambda m: vitrify.compile(m, fullgraph=True)), told(lambda m: m)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("at", ["leaf", "accumulated"])
def test_hooks_see_the_tangent(at):
    """The leaf copies what its hooks have seen, and not before."""
    def told(compile):
        a, b, kept = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), []
        if at == "leaf":
            a.register_hook(kept.append)
        else:
            a.register_post_accumulate_grad_hook(lambda a: kept.append(a.grad))
        t = torch.ones(3)
        f = compile(lambda: a + b.exp())
        f().backward(t)
        t.mul_(5)
        f().backward(t)
        return [*kept, a.grad, b.grad, t]
    for ours, eager in zip(told(lambda f: vitrify.compile(f, fullgraph=True)), told(lambda f: f)):
        torch.testing.assert_close(ours, eager)
