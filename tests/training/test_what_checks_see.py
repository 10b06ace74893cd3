"""An engine that gives later calls what the first one gave, or one memory for the results of all calls, passes none of the checks that other tests are made of."""
import sys
from pathlib import Path

import beside
import compare
import expects
import gradients
import pytest
import torch
import vitrify

sys.path.append(str(Path(__file__).resolve().parent.parent / "ops"))
import opinfo_grad  # noqa: E402

REAL = vitrify.compile


def program(x, w):
    return (x @ w).tanh() * x.sum(0), x.exp()


def stale(fn, **options):
    f, kept = REAL(fn, **options), {}

    def run(*args):
        out = f(*args)  # the counters are right
        for i, (_, t) in enumerate(compare.tensors_of(out)):
            t.data.copy_(kept.setdefault(i, t.detach().clone()))
        return out
    return run


def one_memory(fn, **options):
    f, kept = REAL(fn, **options), {}

    def run(*args):
        out = f(*args)
        for i, (_, t) in enumerate(compare.tensors_of(out)):
            t.data = kept.setdefault(i, t.detach()).copy_(t.detach())
        return out
    return run


CHECKS = {
    "beside": lambda: beside.check(program, beside.steps((3, 3), (3, 3))),
    "ops": lambda: compare.compare(program, (torch.rand(3, 3), torch.rand(3, 3))),
    "gradients": lambda: gradients.check(program, gradients.leaves((3, 3), (3, 3))),
    "gradients of ops": lambda: opinfo_grad.compare(lambda x, args, _: program(x, *args), (torch.rand(3, 3, requires_grad=True), (torch.rand(3, 3, requires_grad=True),), {}), True, compare.fp64_run, False),
}


@pytest.mark.parametrize("check", list(CHECKS))
@pytest.mark.parametrize("broken", [None, stale, one_memory], ids=["right", "stale", "one memory"])
def test_checks(monkeypatch, check, broken):
    expects.compiled("what is wrong is done around it")
    if broken is None:
        return CHECKS[check]()
    monkeypatch.setattr(vitrify, "compile", broken)
    with pytest.raises((AssertionError, compare.Mismatch)):
        CHECKS[check]()
