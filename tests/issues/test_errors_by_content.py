"""A program that catches an error goes eager's way: what a kernel says of numbers that were made up is not what it says of those of the call."""
import expects
import pytest
import torch
import torch.nn.functional as F
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


def read(x):
    try:
        return x.narrow(0, 2, 4) * 2
    except RuntimeError as e:
        return x * len(str(e)) + (str(e).count("size (4)") > 0)


def indexed(x):
    try:
        y = x[25]
    except IndexError as e:
        y = x[0] * int(str(e).split()[-1])
    return y + 1


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("f", [read, indexed])
def test_the_text_of_an_error_has_numbers(f, dynamic):
    compiled = vitrify.compile(f, dynamic=dynamic)
    with torch.no_grad():
        for n in (3, 4, 5, 4, 12, 30):
            torch.testing.assert_close(compiled(torch.ones(n)), f(torch.ones(n)))


REFUSED = {
    "bits": lambda x: torch.cat([torch.bitwise_not(x[5:]), x]) * 2, "bits of two": lambda x: torch.cat([x[5:].bitwise_or(x[5:]), x]),
    "alone": lambda x: torch.bitwise_not(x[5:]) * 2, "divisor": lambda x: torch.cat([torch.gcd(x[5:], x[5:]), x]) * 2,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_type_is_refused_of_no_elements_too(name):
    expects.no_kernels("it raises")
    for g in (REFUSED[name], vitrify.compile(REFUSED[name])):
        with torch.no_grad(), pytest.raises(NotImplementedError, match="not implemented for 'Float'"):
            g(torch.ones(3, 4))


def test_a_text_that_nobody_reads():
    """rms_norm writes its error's text in each call."""
    def f(x):
        try:
            return F.rms_norm(x, (4,)) + 1
        except RuntimeError as e:
            return x + len(str(e))

    compiled = vitrify.compile(f, dynamic=True)
    with torch.no_grad():
        for sizes in ((5, 4), (6, 4), (7, 4), (50, 3), (500, 3), (5, 4)):
            torch.testing.assert_close(compiled(torch.ones(sizes)), f(torch.ones(sizes)))
    assert vitrify.counters["captures"] == 3
