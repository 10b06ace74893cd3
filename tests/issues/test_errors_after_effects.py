"""An error that comes after a custom op has begun: the program's own handlers see it as in eager, and what has run does not run twice."""
import contextlib

import pytest
import torch
import vitrify

CALLS = []


class Refused(Exception):
    pass


def op(x):
    CALLS.append(("op", x.sum().item()))
    if x.sum() > 5:
        raise Refused("too much")
    return x * 2


def log(x):
    CALLS.append(("log", x.sum().item()))


@pytest.fixture
def ops():
    with torch.library._scoped_library("vitrify_after", "FRAGMENT") as lib:
        lib.define("op(Tensor x) -> Tensor")
        lib.define("log(Tensor x) -> ()")
        lib.impl("op", op, "CPU")
        lib.impl("log", log, "CPU")
        torch.library.register_fake("vitrify_after::op", torch.empty_like, lib=lib)
        torch.library.register_fake("vitrify_after::log", lambda x: None, lib=lib)
        yield torch.ops.vitrify_after


def caught(ops, x, i):
    try:
        z = ops.op(x)
    except Refused:
        z = x * 5
    return z + 1


def caught_and_logged(ops, x, i):
    ops.log(x)
    try:
        z = x[i]
    except IndexError:
        z = x * 5
        ops.log(z)
    return z + 1


def at_last(ops, x, i):
    try:
        z = ops.op(x)
    finally:
        ops.log(x + 1)
    return z + 1


def tried_again(ops, x, i):
    for _ in range(3):
        with contextlib.suppress(Refused):
            return ops.op(x) + 1
        x = x * 0.5
    return x


def not_caught(ops, x, i):
    ops.log(x)
    return x.gather(0, i) * 2


def scattered(ops, x, i):
    ops.log(x)
    return x.scatter_add(0, i, x) * 2


@pytest.mark.eager("raised what eager does not, or what the program catches", some=True)
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
@pytest.mark.parametrize("fails", ["x", "i", "nothing"])
@pytest.mark.parametrize("program", [caught, caught_and_logged, at_last, tried_again, not_caught, scattered])
def test_handlers_of_the_program(ops, program, fails):
    def run(f, x, i):
        CALLS.clear()
        try:
            out = f(x, i)
        except Exception as e:
            out = type(e), str(e)
        return out, list(CALLS)
    def f(x, i):
        return program(ops, x, i)
    compiled = vitrify.compile(f)
    good, bad = (torch.ones(1), torch.tensor([0])), (torch.full((1,), 9.0 if fails == "x" else 1.0), torch.tensor([9 if fails == "i" else 0]))
    with torch.no_grad():
        for given in (good, bad, bad, good, bad):
            ours, eager = run(compiled, *given), run(f, *given)
            assert ours == eager
