"""A few random programs in grad mode on every run; tests/fuzz/trained.py runs as many as asked for."""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import compare  # noqa: E402
import trained  # noqa: E402


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(40))
def test_program(seed):
    program = trained.Program(seed, 1 + seed % 12)
    try:
        trained.check(program)
    except compare.Mismatch as wrong:
        pytest.fail(f"{wrong}\n{program.describe()}")


def test_programs_have_gradients():
    programs = [trained.Program(seed, 8) for seed in range(60)]
    assert sum(any(t.requires_grad for t in p.inputs) for p in programs) > 40
    text = "\n".join(p.source for p in programs)
    for part in ("dropout(", "no_grad()", "detach()", "add_("):
        assert part in text


def test_a_wrong_gradient_is_found(monkeypatch):
    """A derivative that is off by a thousandth is caught within a few programs."""
    import vitrify

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.view_as(t)

        @staticmethod
        def backward(ctx, g):
            return g * 1.001
    monkeypatch.setattr(vitrify, "compile", lambda fn: lambda *args: fn(*(Off.apply(a) if a.requires_grad else a for a in args)))
    found = 0
    for seed in range(30):
        try:
            trained.check(trained.Program(seed, 8))
        except compare.Mismatch:
            found += 1
    assert found >= 3
