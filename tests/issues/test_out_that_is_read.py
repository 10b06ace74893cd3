"""out= that is an operand too is not given another size: eager refuses. It was resized."""
import beside
import pytest
import torch

PROGRAMS = ["torch.add(x, y, out=x)", "torch.mul(y, x, out=x)", "torch.sub(x, y, out=x), x", "torch.where(y > 0, x, y, out=x)", "torch.maximum(x, y, out=x) * 2"]


@pytest.mark.parametrize("text", PROGRAMS)
def test_refused(text):
    beside.check(beside.program(f"return {text}"), beside.steps((1, 4), (2, 4)), reason="")


def test_of_its_own_size():
    beside.check(beside.program("return torch.add(x, y, out=x) * 2"), beside.steps((2, 4), (1, 4)))
