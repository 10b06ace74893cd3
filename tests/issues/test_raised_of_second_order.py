"""A program writes over what its gradient has saved: what eager says is the same at second order, where the write was there when the first gradient was taken."""
import pytest
import torch
import vitrify


@pytest.mark.parametrize("orders", [1, 2])
@pytest.mark.parametrize("program", [lambda x, b, w: (y := x * torch.outer(b, b).sum(0) * w, torch.no_grad()(b.add_)(0.1))[0], lambda x, b, w: (y := (x * w).sin() * b * w, torch.no_grad()(b.mul_)(2.0))[0]])
def test_what_it_says(program, orders):
    told = []
    for make in (vitrify.compile, lambda f: f):
        f, w, seen = make(lambda x, b: program(x, b, w)), torch.tensor([0.5, 1.0, 2.0], requires_grad=True), []  # noqa: B023
        for _ in range(2):
            b, x = torch.tensor([1.5, 2.0, 3.0], requires_grad=True), torch.ones(2, 3, requires_grad=True)
            out = f(x, b).pow(2).sum()
            try:
                if orders == 2:
                    out = torch.autograd.grad(out, [w], create_graph=True)[0].pow(2).sum()
                    seen.append("first")
                out.backward()
                seen.append("no error")
            except RuntimeError as e:
                seen.append(str(e))
        told.append(seen)
    assert told[0] == told[1] and any("modified by an inplace operation" in s for s in told[0])
