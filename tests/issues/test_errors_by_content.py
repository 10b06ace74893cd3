"""A program that catches an error goes eager's way: what a kernel says of numbers that were made up is not what it says of those of the call."""
import expects
import pytest
import torch
import vitrify
from torch.nn.utils.rnn import pack_padded_sequence


def packed(x, n):
    return pack_padded_sequence(x, n, enforce_sorted=False)[0]


PROGRAMS = {
    "packed": (packed, lambda: (torch.arange(8.0).view(4, 2, 1), torch.tensor([4, 3]))),
    "nested": (lambda x, y: torch.nested.nested_tensor([x, y]).to_padded_tensor(0.0), lambda: (torch.rand(2, 3), torch.rand(4, 3))),
    "jagged": (lambda x, n: torch.ops.aten._padded_dense_to_jagged_forward(x, [n]), lambda: (torch.rand(2, 3, 4), torch.tensor([0, 2, 5]))),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_caught(name, dynamic):
    op, made = PROGRAMS[name]
    expects.eager("recorded f32 [0,4]" if name == "jagged" else "raises, which the program catches")

    def f(x, n):
        try:
            y = op(x, n)
        except RuntimeError:
            y = x
        return (y * 2).sin()

    compiled = vitrify.compile(f, dynamic=dynamic)
    given = made()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(*given), f(*given))


def test_a_refused_shape_is_raised_whatever_it_holds():
    def f(x):
        try:
            y = x.view(2, 7)
        except RuntimeError:
            y = x.view(3, 4)
        return (y * 2).sin()

    compiled = vitrify.compile(f)
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.ones(12)), f(torch.ones(12)))
    assert vitrify.counters["eager_calls"] == 0
