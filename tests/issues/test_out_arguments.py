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
    "dims of one element": (lambda x, o: torch.add(x.reshape(1, 1, 12).mT, 1, out=o), (1, 2, 5)),
}


@pytest.mark.parametrize("name", RESIZED)
def test_of_the_program(name):
    op, size = RESIZED[name]

    def fn(x):
        o = torch.zeros(size)
        r = op(x, o)
        o.mul_(2)
        return r is o, r + 1, o, o.view(-1)[1:] if o.is_contiguous() else o.mT, o.shape, o.stride()
    check(fn, lambda: [X()], "returns a part of memory that was resized" if name == "add, smaller" else None)


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



P = lambda x: (x @ x.t() + x[0, 0] * torch.eye(3)) / 40  # noqa: E731
COMPOSITE = {  # these give their out argument its size themselves, some write through what shares its memory, and in inference mode they arrive whole
    "matmul": (lambda x, o: torch.matmul(x.view(1, 3, 4), x.t(), out=o), (1, 3, 3)), "matmul of batches": (lambda x, o: torch.matmul(x.view(2, 2, 3), x.view(2, 3, 2), out=o), (2, 2, 2)),
    "matmul with a row": (lambda x, o: torch.matmul(x.view(3, 2, 2), x[0, :2], out=o), (3, 2)), "kron": (lambda x, o: torch.kron(x, x[:2, :2], out=o), (6, 8)),
    "inner": (lambda x, o: torch.inner(x, x + 1, out=o), (3, 3)), "tensordot": (lambda x, o: torch.tensordot(x.view(1, 3, 4), x.t(), dims=1, out=o), (1, 3, 3)), "outer": (lambda x, o: torch.outer(x[0], x[1], out=o), (4, 4)),
    "multi_dot": (lambda x, o: torch.linalg.multi_dot([x, x.t(), x], out=o), (3, 4)), "norm": (lambda x, o: torch.linalg.norm(x, dim=1, out=o), (3,)), "quantile": (lambda x, o: torch.quantile(x, 0.3, 1, out=o), (3,)),
    "matrix_power": (lambda x, o: torch.linalg.matrix_power(P(x), 3, out=o), (3, 3)), "diff": (lambda x, o: torch.diff(x, out=o), (3, 3)), "hstack": (lambda x, o: torch.hstack([x, x], out=o), (3, 8)),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("given", ["fits", "empty", "smaller", "larger"])
@pytest.mark.parametrize("name", COMPOSITE)
def test_of_composites(name, given, mode):
    op, size = COMPOSITE[name]
    if given == "larger":
        expects.eager("returns a part of memory that was resized", some=True)
    of = {"fits": size, "empty": (0,), "smaller": (2,), "larger": (*size, 2)}[given]

    def of_the_program(x):
        o = torch.zeros(of)
        r = op(x, o)
        return r is o, r + 1, o, o.shape, o.stride()

    def of_the_caller(x, o):
        r = op(x, o)
        o.mul_(2)
        return r is o, o + 1, o
    with mode():
        for fn, arguments in ((of_the_program, lambda: [X()]), (of_the_caller, lambda: [X(), torch.zeros(of)])):
            compiled = vitrify.compile(fn)
            for _ in range(2):
                a, b = arguments(), arguments()
                ours, eager = run(compiled, a), run(fn, b)
                same_call((*ours[:2], eager[2], ours[3]) if given != "fits" else ours, eager, a, b)  # of an out argument that gets another size versions are not kept


CREATED = {"randn": lambda o: torch.randn(4, 5, out=o), "empty": lambda o: torch.empty(4, 5, out=o).zero_()}


@pytest.mark.parametrize("start", [(0,), (3,)], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", CREATED)
def test_versions_of_what_is_created(name, mode, start):
    """Of randn() and empty() eager counts that the out argument gets its size."""
    fn = lambda o, x: (CREATED[name](o), x * 2)[1]  # noqa: E731
    compiled = vitrify.compile(fn)
    with mode():
        for _ in range(2):
            a, b = [torch.ones(start), X()], [torch.ones(start), X()]
            torch.manual_seed(0)
            ours = run(compiled, a)
            torch.manual_seed(0)
            same_call(ours, run(fn, b), a, b)
            assert a[0]._version == b[0]._version and torch.equal(a[0], b[0])


@pytest.mark.parametrize("size", [(2, 5), (3, 5), (0,), (3, 4), (12,), ()])
def test_resize_keeps_the_first_elements(size):
    def fn(x, o):
        y = x * 2
        for t in (y, o):
            kept = min(t.numel(), torch.Size(size).numel())
            t.resize_(size).view(-1)[kept:] = 7
        return y, y + 1, o + 1
    if torch.Size(size).numel() < 12:
        expects.eager("returns a part of memory that was resized")
    compiled = vitrify.compile(fn)
    with torch.no_grad():
        for _ in range(2):
            a, b = [X(), X() + 3], [X(), X() + 3]
            same_call(run(compiled, a), run(fn, b), a, b)


def test_memory_that_no_schema_shows():
    """torch.kron(out=...) writes into its result through one like these."""
    def fn(x):
        y = x + 1
        v = torch.ops.aten._unsafe_view(y, (4, 3))
        v.mul_(2)
        y[0, 0] = 9
        w = torch.ops.aten._unsafe_view(x, (12,))
        w[1] = 8
        return y, v + 1, w
    check(fn, lambda: [X()])

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


def resized(b, x):
    b.resize_(x.shape)
    b.copy_(x)
    return x * b.numel()


def joined(b, x):
    torch.cat([x, x], out=b)
    return x / b.shape[0]


def running(b, x):
    if b.numel() == 0:
        b.resize_(x.shape)
        b.copy_(x)
    else:
        b.mul_(0.9).add_(x, alpha=0.1)
    return x - b if b.numel() else x


def alike(b, x):
    b.resize_as_(x)
    return x + 1 if b.dim() == 1 else x * torch.ones(len(b), 1)


@pytest.mark.eager("resize", some=True)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("program", [resized, joined, running])
def test_a_tensor_that_the_program_reaches_is_resized(program, dynamic):
    """It holds the tensor itself, and sees its size."""
    outcomes = []
    for compiled in (False, True):
        b = torch.tensor([])
        f = (lambda x: program(b, x))
        f = vitrify.compile(f, dynamic=dynamic) if compiled else f
        outcomes.append([t.clone() for n in ((3, 3, 3, 3) if program is running else (3, 3, 4, 4, 3)) for t in (f(torch.arange(1.0, 1 + n)), b)])
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.eager("resize", some=True)
def test_a_tensor_that_the_program_reaches_is_resized_as_another():
    outcomes = []
    for make in (vitrify.compile, lambda f: f):
        b = torch.arange(6.0)
        f = make(lambda x: alike(b, x))
        outcomes.append([f(torch.ones(2, 1)), f(torch.ones(2, 1)), torch.tensor(b.shape)])
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b)


A = torch.ops.aten
COPIED = {  # each out argument is written by one copy
    "split_copy": lambda x, a, b: torch.split_copy(x, 2, out=(a, b)), "split_with_sizes_copy": lambda x, a, b: torch.split_with_sizes_copy(x, [2, 2], out=(a, b)),
    "unbind_copy": lambda x, a, b: torch.unbind_copy(x.view(2, 2), out=(b, a)), "unsafe_split": lambda x, a, b: A.unsafe_split.Tensor_out(x, 2, out=(a, b)),
    "unsafe_split_with_sizes": lambda x, a, b: A.unsafe_split_with_sizes.out(x, [2, 2], out=(a, b)), "avg_pool1d": lambda x, a, b: A.avg_pool1d.out(x.view(1, 4), [2], out=b.view(1, 2)),
    "a list of sums": lambda x, a, b: A._foreach_add.List_out([x[:2]], [x[2:]], out=(a,)),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", COPIED)
def test_writes_are_counted(name, mode):
    def fn(x, a, b):
        COPIED[name](x + 1, a, b)
        return a + b
    check(fn, lambda: [torch.arange(4.0), torch.zeros(2), torch.zeros(2)], around=mode)
    check(lambda x, o: fn(x, o[:2], o[2:]), lambda: [torch.arange(4.0), torch.zeros(4)], around=mode)


def test_what_was_saved_before_is_written():
    said = []
    for make in (vitrify.compile, lambda f: f):
        o, w = torch.ones(4), torch.ones(4, requires_grad=True)
        y = (o * w).sum()
        with torch.no_grad():
            make(lambda x, o: (torch.split_copy(x + 1, 2, out=(o[:2], o[2:])), x * 2)[1])(torch.zeros(4), o)
        with pytest.raises(RuntimeError, match="at version 2") as raised:
            y.backward()
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_lists_of_another_length():
    check(lambda x, a: (x.add_(1), torch.split_copy(x, 2, out=(a,)))[0], lambda: [torch.arange(4.0), torch.zeros(2)], reason="")


STATISTICS = {
    "read before": lambda x, m, v: (m + 1, torch.batch_norm_update_stats(x, m, v, 0.1)), "read behind": lambda x, m, v: (torch.batch_norm_update_stats(x, m, v, 0.1)[0], m * 1, v * 1),
    "made here": lambda x, m, v: (lambda a: (torch.batch_norm_update_stats(x, a, v, 0.5)[0], a * 1))(m + 1), "of one tensor": lambda x, m, v: torch.batch_norm_update_stats(x, m, m, 0.1),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_that_are_written_unsaid(name):
    """What the schema takes for an operand, the op writes."""
    check(STATISTICS[name], lambda: [torch.arange(30.0).view(2, 3, 5).sin(), torch.ones(3), torch.ones(3)], reason="calls aten::batch_norm_update_stats")


@pytest.mark.parametrize("size", [(4, 4), (0,)], ids=str)
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("lies", [lambda o: o, lambda o: o.mT], ids=["rows", "columns"])
def test_a_conjugate_view_of_the_callers(left, size, lies):
    """The kernel solves in the out argument's own memory, and then says that it is conjugate."""
    if len(size) == 1:
        lies = lambda o: o  # noqa: E731
    a = torch.view_as_complex(torch.arange(32.0).view(4, 4, 2).sin()) + 4 * torch.eye(4)
    given = (*torch.linalg.lu_factor(a), a + 1)

    def fn(factors, pivots, b, o):
        r = torch.linalg.lu_solve(factors, pivots, b, left=left, out=o)
        return r is o, o.is_conj(), b.real + 1
    make = lambda: [*given, lies(torch.zeros(size, dtype=torch.complex64))]  # noqa: E731
    check(fn, make, reason=None if left else "makes a conjugate or negative view of its out argument")
