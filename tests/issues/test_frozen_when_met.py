"""A program that freezes a weight, uses it, and uses it again unfrozen, as a step of a GAN does with its discriminator: a weight that it met frozen had no gradient."""
import pytest
import torch
import vitrify
from torch import nn

USES = {"an op": lambda w, x: (x * w).sum(), "without gradients": lambda w, x: torch.no_grad()(lambda: (w * 2).sum())(), "detached": lambda w, x: w.detach().sin().sum(), "a view": lambda w, x: (x * w[1:2]).sum()}


def toggled(w, state, use, x):
    w.requires_grad_(state)
    y = USES[use](w, x)
    w.requires_grad_(True)
    return y


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("order", ["frozen, unfrozen", "unfrozen, frozen", "frozen, unfrozen, frozen, unfrozen", "unfrozen, frozen, unfrozen"])
def test_orders(order, use):
    def told(compile):
        w, seen = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True), []

        def program(x):
            y = x.sum()
            for state in order.split(", "):
                y = y * toggled(w, state == "unfrozen", use if state == "frozen" else "an op", x)
            return y
        f = compile(program)
        for k in range(3):
            x = torch.full((3,), 0.5 + k, dtype=torch.float64, requires_grad=True)
            w.grad = None
            y = f(x)
            dx, dw = torch.autograd.grad(y, (x, w), create_graph=True)
            ddx, = torch.autograd.grad(dw.sum(), x, retain_graph=True)
            y.backward()
            seen.append((y.detach(), x.grad, w.grad, dx.detach(), dw.detach(), ddx))
        return seen
    torch.testing.assert_close(told(vitrify.compile), told(lambda f: f))


@pytest.mark.parametrize("of", ["parameters", "module"])
def test_a_step_of_two_networks(of):
    def make():
        torch.manual_seed(0)
        return nn.ModuleDict({"maker": nn.Linear(2, 3), "judge": nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))}).double()

    def freeze(judge, state):
        if of == "module":
            judge.requires_grad_(state)
        else:
            for p in judge.parameters():
                p.requires_grad_(state)

    def told(compile):
        nets, seen = make(), []
        maker, judge = nets["maker"], nets["judge"]

        def loss(z, x):
            freeze(judge, False)
            made = maker(z)
            cheats = -judge(made).mean()
            freeze(judge, True)
            return cheats + judge(made.detach()).mean() - judge(x).mean()
        f, optimizer = compile(loss), torch.optim.SGD(nets.parameters(), lr=0.1)
        for k in range(4):
            optimizer.zero_grad()
            f(torch.full((2 + k % 2, 2), 0.5).double(), torch.full((3, 3), 1.0).double()).backward()
            seen += [p.grad.clone() for p in nets.parameters()]
            optimizer.step()
        return seen
    torch.testing.assert_close(told(vitrify.compile), told(lambda f: f))
