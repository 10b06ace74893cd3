"""An exception that the program makes of a tensor reaches the user with eager's tensor, and what the program has done before stays as in eager."""
import random

import expects
import pytest
import torch
import vitrify


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.n, self.last = 0, None
        self.register_buffer("b", torch.zeros(2))

    def forward(self, x):
        self.n += 1
        self.last = x * 2
        self.b.add_(torch.rand(2))
        random.random()
        if x.shape[0] > 2:
            raise ValueError("too long", self.last)
        return x + self.b.sum()


def test_what_was_done_before_stays():
    expects.eager("random generator", some=True)
    expects.no_kernels("it raises, and draws from Python's generator")
    seen = []
    for compiled in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        m = Model()
        f = vitrify.compile(m) if compiled else m
        with torch.no_grad():
            for n in (3, 2, 3):
                try:
                    seen.append(f(torch.ones(n)))
                except ValueError as e:
                    seen.append(str(e))
                seen += [m.n, m.b.clone(), m.last + 1, torch.rand(2), random.random()]
    half = len(seen) // 2
    for a, b in zip(seen[half:], seen[:half]):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b)
        else:
            assert a == b


class OwnError(Exception):
    def __str__(self):
        return f"{self.args[0].sum().item():.1f} of {self.args[0].tolist()}"


@pytest.mark.parametrize("kind", [ValueError, OwnError, RuntimeError])
def test_its_text(kind):
    def f(x, limit):
        y = x * 2
        if x.shape[0] > limit:
            raise kind(y, "too long")
        return y + 1

    compiled = vitrify.compile(f)
    expects.eager("too long", kind.__name__, "looks into the memory", some=True)
    with torch.no_grad():
        for n in (3, 2, 3):
            texts = []
            for g in (f, compiled):
                try:
                    texts.append(str(g(torch.ones(n), 2)))
                except kind as e:
                    texts.append(str(e))
            assert texts[0] == texts[1]
