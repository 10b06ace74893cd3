"""What tests compare with (tests/compare.py, tests/training/gradients.py): an engine that breaks one promise is found by each of them."""
import re
import sys
from pathlib import Path

import pytest
import torch
import vitrify

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "training")]
import compare  # noqa: E402
import gradients  # noqa: E402

pytestmark = pytest.mark.no_kernels("in place of the engine something else runs")


def program(x, y):
    x.add_(1)
    return x.mul(2), [y.view(-1)[1:], torch.rand(2)], {"n": 3}


def given():
    return torch.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3)


def twice(fn, x, y):
    x.mul_(1)
    return fn(x, y)


def reordered(fn, x, y):
    a, b, c = fn(x, y)
    return (a.t().clone(memory_format=torch.contiguous_format).t(), b, c)


def of(change):
    return lambda fn, x, y: change(*fn(x, y))


BROKEN = {
    "a value": (of(lambda a, b, c: (a * (1 + 3e-6), b, c)), "values differ|error"),
    "a number": (of(lambda a, b, c: (a, b, {"n": 3.0})), "3.0"),
    "a dtype": (of(lambda a, b, c: (a.double(), b, c)), "dtype"),
    "strides": (reordered, "strides"),
    "a container": (of(lambda a, b, c: (a, tuple(b), c)), "structure"),
    "the outer container": (of(lambda *out: list(out)), "structure"),
    "a missing result": (of(lambda a, b, c: (a, b)), "structure"),
    "a copy for a view": (of(lambda a, b, c: (a, [b[0].clone(), b[1]], c)), "aliasing"),
    "a view elsewhere": (lambda fn, x, y: (lambda a, b, c: (a, [torch.cat([y.view(-1), y.view(-1)[1:]])[6:], b[1]], c))(*fn(x, y)), "aliasing"),
    "a write left out": (lambda fn, x, y: fn(x.clone(), y), "version|values differ"),
    "a version too many": (twice, "version"),
    "another argument written": (lambda fn, x, y: (fn(x, y), y.add_(0))[0], "version"),
    "a number drawn": (lambda fn, x, y: (fn(x, y), torch.rand(1))[0], "random state"),
    "a gradient needed": (of(lambda a, b, c: (a.requires_grad_(), b, c)), "requires_grad"),
    "an error": (lambda fn, x, y: 1 / 0, "raised"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise(monkeypatch, name):
    run, says = BROKEN[name]
    monkeypatch.setattr(vitrify, "compile", lambda fn: lambda *args: run(fn, *args))
    with pytest.raises(compare.Mismatch) as wrong:
        compare.compare(program, given())
    assert re.search(says, str(wrong.value)), wrong.value


def raises(x, y):
    x.add_(1)
    raise ValueError("too large")


@pytest.mark.parametrize("ours, says", [
    (lambda fn: lambda x, y: fn(x.clone(), y), "version"), (lambda fn: lambda x, y: None, "raised"), (lambda fn: lambda x, y: fn(x.data, y), "version"),
    (lambda fn: lambda x, y: (torch.rand(1), fn(x, y)), "random state"), (lambda fn: lambda x, y: (x.add_(0.5).sub_(0.5), fn(x.data, y)), "version"), (lambda fn: lambda x, y: (y.data.add_(1), fn(x, y)), "values differ"),
], ids=["write left out", "no error", "no version", "number drawn", "versions", "another argument"])
def test_what_an_error_leaves(monkeypatch, ours, says):
    compare_of = lambda: compare.compare(raises, given())  # noqa: E731
    monkeypatch.setattr(vitrify, "compile", lambda fn: fn)
    assert compare_of()["raised"]
    monkeypatch.setattr(vitrify, "compile", ours)
    with pytest.raises(compare.Mismatch, match=says):
        compare_of()


@pytest.mark.parametrize("text", ["too large", "too small"])
def test_what_an_error_says(monkeypatch, text):
    def other(x, y):
        x.add_(1)
        raise ValueError(text)
    monkeypatch.setattr(vitrify, "compile", lambda fn: other)
    if text == "too large":
        assert compare.compare(raises, given())["raised"]
    else:
        with pytest.raises(compare.Mismatch, match="raised"):
            compare.compare(raises, given())


def test_a_sample_of_which_eager_says_nothing_is_counted():
    """A sum that cancels to nothing but roundings: whatever comes out, it is not taken for equal."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e6
    f = lambda x: (x.sum() - x.flip(0).sum()).reshape(1)  # noqa: E731
    reference = compare.conditioned_run(f, (x,), 2)
    assert reference[0][1] is None and reference[1][1] is not None


TRAINED = lambda x, y: (x * y, (x.sin() + y))  # noqa: E731
LEAVES = gradients.leaves((2, 3), (2, 3))
WRONG = {
    "a value": lambda x, y: (x * y * 1.0001, x.sin() + y), "a container": lambda x, y: [x * y, x.sin() + y], "no gradient": lambda x, y: (x * y, x.sin().detach() + y), "a detached result": lambda x, y: ((x * y).detach(), x.sin() + y),
    "a version": lambda x, y: (x.detach().add_(0), TRAINED(x, y))[1], "a number drawn": lambda x, y: (torch.rand(1), TRAINED(x, y))[1],
    "a gradient": lambda x, y: (x * y, x.sin() + y * 2 - y.detach()),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_broken_promise_of_gradients(name):
    with torch.enable_grad():
        eager = gradients.Run(TRAINED, LEAVES())
        gradients.same(gradients.Run(TRAINED, LEAVES()), eager)
        ours = gradients.Run(WRONG[name], LEAVES())
        with pytest.raises((AssertionError, compare.Mismatch)):
            gradients.same(ours, eager)
