"""What a custom op is given lies where eager's lies: views of other dtypes, views of no elements, equal values, and arguments that the program has written."""
import pytest
import torch
import vitrify

lib = torch.library.Library("places_for_custom_ops", "DEF")
lib.define("look(Tensor x) -> Tensor")
lib.impl("look", lambda x: torch.tensor([x.storage_offset(), x.untyped_storage().nbytes(), *x.stride()]), "CPU")
lib.impl("look", lambda x: x.new_empty(2 + x.dim(), dtype=torch.int64), "Meta")
lib.define("together(Tensor[] x) -> Tensor")
lib.impl("together", lambda x: torch.tensor([t.untyped_storage().data_ptr() == x[0].untyped_storage().data_ptr() for t in x]), "CPU")
lib.impl("together", lambda x: x[0].new_empty(len(x), dtype=torch.bool), "Meta")
ops = torch.ops.places_for_custom_ops


def part():
    return torch.arange(12.0)[3:9]


def both(program, make=part):
    f = lambda x: program(x) * 2  # by a kernel of ours
    with torch.no_grad():
        assert vitrify.compile(f)(make()).tolist() == f(make()).tolist()


PROGRAMS = {
    "another dtype, of an argument": lambda x: ops.look(x[1:].view(torch.int32)),
    "another dtype, of a value": lambda x: ops.look(x.sin()[1:].view(torch.int32)),
    "a part of another dtype": lambda x: ops.look(x.view(torch.int32)[1:]),
    "another dtype that is read too": lambda x: ops.look((y := x.sin()[1:].view(torch.int32))) + (y.sum() - y.sum()),
    "nothing of an argument": lambda x: ops.look(x[6:]),
    "nothing of a value": lambda x: ops.look(x.sin()[6:]),
    "a view of nothing": lambda x: ops.look(x.sin()[6:].view(0, 3)),
    "equal values": lambda x: ops.together([x.sin()[1:], x.sin()[1:], x.cos(), x.sin()]),
    "views of one value": lambda x: ops.together([(y := x.sin())[1:], y[1:], y]),
}


@pytest.mark.parametrize("f", PROGRAMS.values(), ids=PROGRAMS)
def test_views_and_values(f):
    both(f)


def test_a_written_argument_that_is_whole():
    both(lambda x: ops.look(x.add_(1)[1:]), lambda: torch.arange(6.0))


@pytest.mark.eager("once it is written, which is a part of its memory")
@pytest.mark.parametrize("f", [lambda x: ops.look(x.add_(1)), lambda x: ops.look(x.add_(1)[1:]), lambda x: (x[1:].add_(1), ops.look(x[2:]))[1]], ids=["whole", "view", "other view"])
def test_a_written_argument_that_is_a_part(f):
    both(f)


@pytest.mark.eager("once it is written, which is a part of its memory")
def test_a_later_argument_is_a_part():
    f = lambda x: ops.look(x.add_(1)) * 2
    g = vitrify.compile(f)
    with torch.no_grad():
        for make in (lambda: torch.arange(6.0), lambda: torch.arange(12.0)[:6], lambda: torch.arange(12.0)[3:9], lambda: torch.arange(6.0)):
            x, y = make(), make()
            assert g(x).tolist() == f(y).tolist() and torch.equal(x, y)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_written_argument_of_other_sizes(dynamic):
    f = lambda x: ops.look(x.add_(1)) * 2
    g = vitrify.compile(f, dynamic=dynamic)
    with torch.no_grad():
        for n in (6, 7, 6, 9):
            assert g(torch.arange(float(n))).tolist() == f(torch.arange(float(n))).tolist()
