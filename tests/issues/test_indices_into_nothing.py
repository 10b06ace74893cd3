"""An index into a tensor that has no elements is out of range whatever it is: a kernel has no element to go on with."""
import expects
import pytest
import torch
import vitrify

INDEX, ONE = torch.tensor([0]), torch.ones(1)
OPS = {
    "index_add": lambda x: x.index_add(0, INDEX, ONE), "index_fill": lambda x: x.index_fill(0, INDEX, 1.0), "scatter": lambda x: x.scatter(0, INDEX, 1.0),
    "scatter_add": lambda x: x.scatter_add(0, INDEX, ONE), "index_put": lambda x: x.index_put((INDEX,), ONE),
    "accumulated": lambda x: x.index_put((INDEX,), ONE, accumulate=True), "index_select": lambda x: x.index_select(0, INDEX) * 2,
    "gather": lambda x: x.gather(0, INDEX) * 2, "index": lambda x: x[INDEX] * 2,
}


def outcome(f, x):
    try:
        return f(x)
    except (IndexError, RuntimeError) as e:
        return type(e), str(e).partition("\n")[0]


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


@pytest.mark.eager("a size that follows from content is not what the plan is for", some=True)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["llvm", "interp"])
def test_of_rows_that_come_and_go(op, backend):
    found, cut = (lambda x: OPS[op](x[x > 0])), (lambda x: OPS[op]((x + 1)[2:]))
    for f, dynamic, several in ((found, None, ([1.0, -1.0], [-1.0, -1.0], [2.0, 3.0])), (cut, True, ([1.0] * 4, [1.0] * 2, [1.0] * 5))):
        compiled, before = vitrify.compile(f, dynamic=dynamic, options={"backend": backend}), dict(vitrify.counters)
        for numbers in several:
            x = torch.tensor(numbers)
            assert same(outcome(compiled, x), outcome(f, x)), numbers
        assert vitrify.counters["compiled_calls"] > before["compiled_calls"]


@pytest.mark.parametrize("op", OPS)
def test_of_no_rows_at_all(op):
    expects.no_kernels("the program raises")
    compiled = vitrify.compile(OPS[op])
    for _ in range(2):
        assert same(outcome(compiled, torch.empty(0)), outcome(OPS[op], torch.empty(0)))


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("shape, dim", [((0, 4), 0), ((3, 0), 0), ((3, 0), 1), ((0,), 0)])
@pytest.mark.parametrize("index", [[0], [0, 1], [5], [-1], []])
def test_where_eager_does_not_look(index, shape, dim, read):
    """index_add() looks at indices into what is empty where there is one dim alone."""
    if len(shape) == 1 and index:
        expects.no_kernels("eager raises")
    else:
        expects.compiled("there is nothing to compute")
    source = torch.ones([len(index) if d == dim else n for d, n in enumerate(shape)])

    def f(x):
        y = torch.index_add(x, dim, torch.tensor(index, dtype=torch.int64), source)
        return y if read else x * 1
    compiled = vitrify.compile(f)
    for _ in range(2):
        assert same(outcome(compiled, torch.empty(shape)), outcome(f, torch.empty(shape)))
