"""A weight that the program reaches by itself is an argument of its first call too. What its gradient reads was taken for the argument: an error where a later one was written."""
import pytest
import torch
import vitrify

WRITES = {"nothing": lambda w, u: None, "the other": lambda w, u: u.mul_(1.5), "the weight": lambda w, u: w.mul_(1.5), "the weight's data": lambda w, u: setattr(w, "data", w.data * 1.5), "the other's data": lambda w, u: setattr(u, "data", u.data * 1.5)}
PROGRAMS = {"gelu": lambda w, x: torch.nn.functional.gelu(w) * x, "exp": lambda w, x: w.exp() * w * x}


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [0, 0, 1], [1, 1]], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("written", WRITES)
def test_as_eager(written, program, order):
    def told(compile):
        w, u = (torch.rand(3, generator=torch.Generator().manual_seed(k), dtype=torch.float64).requires_grad_() for k in (0, 1))
        f, seen = compile(lambda x, other: PROGRAMS[program](w, x)), []
        for k in order:
            r = f(torch.ones(3), (w, u)[k])
            with torch.no_grad():
                WRITES[written](w, u)
            try:
                seen.append((r.detach(), *torch.autograd.grad((r * r).sum(), [w, u], allow_unused=True)))
            except RuntimeError as e:
                seen.append((r.detach(), "modified by an inplace operation" in str(e)))
        return seen
    torch.testing.assert_close(told(vitrify.compile), told(lambda f: f))
