"""What a custom op is given lies where eager's lies: views of other dtypes, views of no elements and equal values."""
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
lib.define("doubled(Tensor x) -> Tensor")
lib.impl("doubled", lambda x: x * 2, "CPU")
lib.impl("doubled", lambda x: x.new_empty(x.shape), "Meta")
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


@pytest.mark.parametrize("part", [lambda x: x[2:], lambda x: x[:4], lambda x: x.view(6, 2)[:, 1]], ids=["rows", "front", "columns"])
def test_values_of_a_written_argument_that_is_a_part(part):
    """Where it lies is not as in eager (docs/differences.md), what it holds and how is: a cache that is written and then given to an op, say."""
    def f(x):
        x.add_(1)
        return ops.doubled(x) + 1
    with torch.no_grad():
        x, y = part(torch.arange(12.0)), part(torch.arange(12.0))
        for _ in range(2):
            assert torch.equal(vitrify.compile(f)(x), f(y)) and torch.equal(x, y)
    assert vitrify.counters["eager_calls"] == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_written_argument_of_other_sizes(dynamic):
    f = lambda x: ops.look(x.add_(1)) * 2
    g = vitrify.compile(f, dynamic=dynamic)
    with torch.no_grad():
        for n in (6, 7, 6, 9):
            assert g(torch.arange(float(n))).tolist() == f(torch.arange(float(n))).tolist()
