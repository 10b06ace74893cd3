"""What the program comes to in one way only, as the derivatives of a determinant of a singular matrix, raised in calls that go another way: it ran before the
numbers that decide had been looked at."""
import itertools

import pytest
import torch
import vitrify

GRAM = torch.tensor([[0.2, 0.1, 0.1], [0.1, 1.7, 1.4], [0.5, 0.4, 1.2], [0.2, 0.7, 1.5]], dtype=torch.float64)
INFINITE = GRAM.clone()
INFINITE[3, 2] = torch.inf
KINDS = {
    "regular": torch.tensor([[2.0, 1, 0], [1, 3, 1], [0, 1, 4]], dtype=torch.float64),
    "singular": torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.float64),
    "three of four": GRAM @ GRAM.mT, "infinite": INFINITE @ INFINITE.mT,
}


def of_second_order(f, x):
    x = x.clone().requires_grad_()
    first, = torch.autograd.grad(f(x), x, create_graph=True)
    return first.detach(), *torch.autograd.grad(first.square().sum(), x)


@pytest.mark.parametrize("order", itertools.permutations(KINDS, 2), ids="-".join)
def test_of_determinants(order):
    fn = lambda x: torch.linalg.det(x)  # noqa: E731
    compiled = vitrify.compile(fn, fullgraph=True, dynamic=True)
    for kind in order:
        torch.testing.assert_close(of_second_order(compiled, KINDS[kind]), of_second_order(fn, KINDS[kind]), equal_nan=True)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_a_program(order):
    def program(x, b):
        p = b.abs() < 0.5
        if p.item():
            y = torch.linalg.inv(x)
            return torch.cat([torch.linalg.det(y)[None] * b, b[None]]), y
        return x * 2, b
    compiled = vitrify.compile(program)
    calls = (torch.eye(3) * 2, torch.tensor(0.1)), (torch.ones(3, 3), torch.tensor(2.0))
    for k in order:
        torch.testing.assert_close(compiled(*calls[k]), program(*calls[k]))
