"""A derivative that a user has written need not be linear: all gradients of what it is applied to come to it at once, also where that is no result of the program."""
import pytest
import torch
import vitrify
from torch.utils.checkpoint import checkpoint


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1, 1)


class Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, g, h):
        return (g + 2 * h).clamp(-1, 1)


@torch.library.custom_op("vitrify_tests::clipped_behind", mutates_args=())
def clipped(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


clipped.register_fake(lambda x: torch.empty_like(x))
clipped.register_autograd(lambda ctx, g: g.clamp(-1, 1))

PROGRAMS = {
    "hidden": lambda x, w: Clip.apply(x) ** 2, "custom op": lambda x, w: clipped(x) ** 2, "a result too": lambda x, w: [h := Clip.apply(x), (h * h).sin()][1] + h,
    "behind another": lambda x, w: Clip.apply(Clip.apply(x * w) ** 2).exp(), "of two results": lambda x, w: (lambda a, b: a * b.sin())(*Two.apply(x * w)),
    "in front of sums": lambda x, w: (Clip.apply(x * w) ** 2).sum(0, keepdim=True) * w, "checkpoint": lambda x, w: checkpoint(lambda x: Clip.apply(x * w) ** 2, x, use_reentrant=False),
    "twice": lambda x, w: (lambda h: (h * h).sum() + (h.sin() * w).sum())(Clip.apply(x)),
}


def penalty(y, x, w):
    q, = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.sum() + q.pow(2).sum()).backward()


def in_two_steps(y, x, w):
    q, = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.autograd.backward([y.sum(), q.pow(2).sum()], inputs=[x, w], retain_graph=True)
    y.cos().sum().backward()


def third(y, x, w):
    q, = torch.autograd.grad(y.sum(), x, create_graph=True)
    r, = torch.autograd.grad(q.sin().sum() + y.sum(), x, create_graph=True)
    (r.sum() + q.sum() + y.sum()).backward()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("use", [penalty, in_two_steps, third])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_of_two_levels_meet_in_front_of_it(name, use, dynamic):
    program, results = PROGRAMS[name], []
    compiled = vitrify.compile(program, dynamic=dynamic)
    for f in (program, compiled, compiled):
        x, w = torch.tensor([0.4, 0.1, 2.0, -0.3], requires_grad=True), torch.tensor([0.5, -1.5, 1.0, 2.0], requires_grad=True)
        use(f(x, w), x, w)
        results.append([t.grad if t.grad is not None else torch.zeros(4) for t in (x, w)])
    for got in results[1:]:
        torch.testing.assert_close(got, results[0])
