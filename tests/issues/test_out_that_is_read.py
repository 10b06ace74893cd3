"""out= that is an operand too is not given another size, and addcdiv divides no integers: eager refuses."""
import beside
import pytest
import torch

PROGRAMS = ["torch.add(x, y, out=x)", "torch.mul(y, x, out=x)", "torch.sub(x, y, out=x), x", "torch.where(y > 0, x, y, out=x)", "torch.maximum(x, y, out=x) * 2"]


@pytest.mark.parametrize("text", PROGRAMS)
def test_refused(text):
    beside.check(beside.program(f"return {text}"), beside.steps((1, 4), (2, 4)), reason="")


def test_of_its_own_size():
    beside.check(beside.program("return torch.add(x, y, out=x) * 2"), beside.steps((2, 4), (1, 4)))


@pytest.mark.parametrize("text", ["torch.addcdiv(x, y, y)", "x.addcdiv_(y, y)", "torch.addcdiv(x, y, y > 0, value=2.0)"])
def test_integers_are_not_divided(text):
    beside.check(beside.program(f"return {text}"), lambda: [torch.ones(4), torch.arange(1, 5)], reason="")


def test_an_integer_among_floats():
    beside.check(beside.program("return torch.addcdiv(x, y, x + 1)"), lambda: [torch.ones(4), torch.arange(1, 5)])
