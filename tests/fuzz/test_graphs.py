"""A few random programs on every run; ./x fuzz runs as many as asked for. And the generator itself."""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import compare  # noqa: E402
import graphs  # noqa: E402


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(40))
def test_program(seed):
    program = graphs.Program(seed, 1 + seed % 12)
    with torch.no_grad():
        try:
            graphs.check(program)
        except compare.Mismatch as wrong:
            pytest.fail(f"{wrong}\n{program.describe()}")


def test_same_seed_same_program():
    assert graphs.Program(7, 12).describe() == graphs.Program(7, 12).describe()


def test_programs_vary():
    sources = {graphs.Program(seed, 12).source for seed in range(60)}
    text = "\n".join(sources)
    assert len(sources) == 60
    for part in ("sum(", "transpose(", "add_(", "expand(", "cat(", "matmul("):
        assert part in text


def test_a_wrong_program_is_found(monkeypatch):
    """An engine that computes something else for one op is caught within a few programs."""
    import vitrify

    def broken(fn):
        def run(*args):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "tanh", lambda x: torch.atan(x))
                patch.setattr(torch, "relu", lambda x: torch.abs(x))
                return fn(*args)
        return run
    monkeypatch.setattr(vitrify, "compile", broken)
    found = 0
    with torch.no_grad():
        for seed in range(60):
            try:
                graphs.check(graphs.Program(seed, 12))
            except compare.Mismatch:
                found += 1
    assert found >= 3
