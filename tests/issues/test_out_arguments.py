"""Out arguments of another size or type: eager gives them the size of the result, and converts what it computes element by element."""
import compare
import expects
import pytest
import torch
import vitrify
from beside import check, run, same_call

X = lambda: torch.arange(12.0).view(3, 4) - 5  # noqa: E731
pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements")

RESIZED = {
    "add": (lambda x, o: torch.add(x, 1, out=o), (2, 5)), "add, smaller": (lambda x, o: torch.add(x[0, :2], 1, out=o), (3, 4)), "amax of one": (lambda x, o: torch.amax(x[0, 0], 0, out=o), (1,)),
    "sum": (lambda x, o: torch.sum(x, 0, out=o), (3,)), "mm": (lambda x, o: torch.mm(x, x.t(), out=o), (1,)), "cat": (lambda x, o: torch.cat([x, x], out=o), (1, 4)),
    "a transposed operand": (lambda x, o: torch.add(x.t(), 1, out=o), (5,)), "empty, of a transposed operand": (lambda x, o: torch.mul(x.t(), 2, out=o), (0,)),
}


@pytest.mark.parametrize("name", RESIZED)
def test_of_the_program(name):
    op, size = RESIZED[name]

    def fn(x):
        o = torch.zeros(size)
        r = op(x, o)
        o.mul_(2)
        return r is o, r + 1, o, o.view(-1)[1:] if o.is_contiguous() else o.mT, o.shape, o.stride()
    check(fn, lambda: [X()])


@pytest.mark.parametrize("name", RESIZED)
def test_of_the_caller(name):
    """The caller's tensor has the new size afterwards: the next call with it is another signature."""
    op, size = RESIZED[name]

    def fn(x, o):
        op(x, o)
        o.mul_(2)
        return o, o + 1
    check(fn, lambda: [X(), torch.zeros(size)])
    compiled = vitrify.compile(fn)
    with torch.no_grad():
        a, b = [X(), torch.zeros(size)], [X(), torch.zeros(size)]
        for _ in range(2):
            same_call(run(compiled, a), run(fn, b), a, b)


def test_of_the_caller_in_a_larger_memory():
    """Eager writes over what lies behind it there."""
    def fn(x, o):
        torch.add(x, 1, out=o)
        return x * 2
    compiled = vitrify.compile(fn)
    with torch.no_grad():
        for start in (2, 0, 9):
            mine, theirs = torch.zeros(40), torch.zeros(40)
            a, b = [X(), mine[start:start + 3]], [X(), theirs[start:start + 3]]
            same_call(run(compiled, a), run(fn, b), a, b)
            assert torch.equal(mine, theirs)


@pytest.mark.eager("resizes its out argument")
def test_seen_through_a_view():
    def fn(x):
        o = torch.zeros(5)
        v = o[1:]
        torch.add(x, 1, out=o)
        return v + 1, o
    check(fn, lambda: [X()], reason="resizes its out argument")


CONVERTED = {
    "sigmoid": lambda x, o: torch.sigmoid(x, out=o), "add": lambda x, o: torch.add(x, x, out=o), "mul by a number": lambda x, o: torch.mul(x, 1.5, out=o), "exp": lambda x, o: torch.exp(x, out=o), "lt": lambda x, o: torch.lt(x, 1, out=o),
    "div": lambda x, o: torch.div(x, 3, out=o), "logical_not": lambda x, o: torch.logical_not(x, out=o), "maximum": lambda x, o: torch.maximum(x, -x, out=o), "atan2": lambda x, o: torch.atan2(x, x + 1, out=o),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int32], ids=str)
@pytest.mark.parametrize("name", CONVERTED)
def test_another_type(name, dtype):
    op = CONVERTED[name]

    def fn(x):
        o = torch.zeros(x.shape, dtype=dtype)
        op(x, o)
        return o, o * 2
    if compare.attempt(fn, X())[1] is not None:
        expects.no_kernels("the program raises", some=True)
        return check(fn, lambda: [X()], reason="")
    check(fn, lambda: [X()])


def test_another_type_and_size():
    def fn(x):
        o = torch.zeros(3, dtype=torch.float64)
        torch.sigmoid(x, out=o)
        return o
    check(fn, lambda: [X()])


def test_sums_compute_in_the_type_of_their_out_argument():
    def fn(x):
        return torch.sum(x, 0, out=torch.zeros(4, dtype=torch.float64))
    check(fn, lambda: [X()], reason="type of its out argument")
