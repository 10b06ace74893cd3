"""What memory holds beside and behind a tensor, and where in it the tensor begins: reads of nothing, shrinking and growing, offsets that follow from sizes, one tensor given twice."""
import subprocess
import sys

import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify

A, R = torch.arange, torch.randn


def call(fn, args):
    try:
        return fn(*args), None
    except Exception as e:
        return None, e


def beside(fn, *makes, dynamic=None):
    """Calls with each of `makes` in turn, compiled beside eager: values, exceptions, inputs."""
    compiled = vitrify.compile(fn, dynamic=dynamic)
    with torch.no_grad():
        for k, make in enumerate(makes):
            torch.manual_seed(k)
            a = make()
            torch.manual_seed(k)
            b = make()
            (ours, our_error), (eager, error) = call(compiled, a), call(fn, b)
            assert type(our_error) is type(error) and str(our_error).partition("\n")[0] == str(error).partition("\n")[0], f"call {k}: {our_error!r}, eager {error!r}"
            flat = lambda v: list(v) if isinstance(v, (tuple, list)) else [v]  # noqa: E731
            for x, y in zip(flat(ours) + list(a), flat(eager) + list(b)):
                if isinstance(y, torch.Tensor):
                    torch.testing.assert_close(x, y, equal_nan=True)
                else:
                    assert x == y, f"call {k}: {x!r}, eager {y!r}"


def lives(text):
    """The program in a process of its own, as it may die."""
    done = subprocess.run([sys.executable, "-c", "import torch, vitrify, torch.nn.functional as F\ntorch.set_grad_enabled(False)\n" + text], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"died with {done.returncode}: {done.stderr[:300]}"


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("another process compiles")
@pytest.mark.parametrize("op, x, i", [
    ("x.gather(1, i)", "torch.randn(4, 0)", "torch.zeros(4, 2, dtype=torch.long)"),
    ("x.gather(0, i)", "torch.randn(0)", "torch.zeros(2, dtype=torch.long)"),
    ("x.index_select(0, i)", "torch.randn(0, 3)", "torch.zeros(2, dtype=torch.long)"),
    ("F.embedding(i, x)", "torch.randn(0, 3)", "torch.zeros(2, dtype=torch.long)"),
    ("F.nll_loss(x, i)", "torch.randn(4, 0)", "torch.zeros(4, dtype=torch.long)"),
    ("F.cross_entropy(x, i, reduction='none')", "torch.randn(4, 0)", "torch.zeros(4, dtype=torch.long)"),
    ("torch.take_along_dim(x, i, 1)", "torch.randn(4, 0)", "torch.zeros(4, 2, dtype=torch.long)"),
], ids=["gather", "gather1d", "index_select", "embedding", "nll", "cross_entropy", "take_along_dim"])
def test_reading_what_is_empty_kills_the_process(op, x, i):
    lives(f"""
def f(x, i): return {op} + 1
try: vitrify.compile(f)({x}, {i})
except Exception as e: ours = e
else: raise SystemExit(1)
try: f({x}, {i})
except Exception as e: assert type(e) is type(ours) and str(e) == str(ours), (e, ours)
""")


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("another process compiles")
@pytest.mark.parametrize("op", ["x.gather(0, i)", "x.index_select(0, i)", "x[i]", "x.take(i)", "F.embedding(i, x[:, None].expand(-1, 3).contiguous())"])
def test_reading_what_is_found_empty(op):
    lives(f"""
def f(x, i):
    x = x[x > 0]
    return {op} + 1
compiled, i = vitrify.compile(f), torch.tensor([0, 1])
for x in (torch.ones(4), -torch.ones(4), torch.ones(4)):
    try: want = f(x, i)
    except Exception as e: want = e
    try: got = compiled(x, i)
    except Exception as e: got = e
    assert type(got) is type(want) and (torch.equal(got, want) if torch.is_tensor(got) else str(got) == str(want)), (got, want)
""")


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("another process compiles")
@pytest.mark.parametrize("what", ["x.is_shared()", "x.untyped_storage().is_shared()", "(x * 2).is_shared()"])
def test_is_shared_kills_the_process(what):
    lives(f"""
def f(x): return x + 1 if {what} else x - 1
vitrify.compile(f)(torch.randn(3))
""")


@pytest.mark.eager("resize_", some=True)
@pytest.mark.parametrize("shrink", [
    lambda y: y.resize_(2),
    lambda y: y.resize_(0),
    lambda y: torch.neg(torch.ones(2), out=y),
    lambda y: torch.cat([torch.ones(1), torch.ones(1)], out=y),
], ids=["resize_", "to nothing", "out", "cat out"])
def test_resize_back(shrink):
    def f(x):
        y = x + 1
        shrink(y)
        return y.resize_(6)
    beside(f, lambda: [A(6.)], lambda: [A(6.) * 3])


TWO = [lambda: [A(20.), R(3)], lambda: [A(20.), R(5)], lambda: [A(20.), R(7)]]
EVEN = [lambda: [A(20.), R(2)], lambda: [A(20.), R(4)], lambda: [A(20.), R(3)]]


@pytest.mark.parametrize("body", [
    lambda x, k: x[k:k + 4].as_strided((2,), (1,)) + 1,
    lambda x, k: torch.as_strided(x.narrow(0, k, 4), (2, 2), (1, 1)) + 1,
    lambda x, k: x.split([k, 4, 16 - k])[1].as_strided((2,), (1,)) + 1,
], ids=["slice", "narrow", "split"])
def test_offset_of_a_view_by_a_size(body):
    beside(lambda x, y: body(x, y.shape[0]), *TWO, dynamic=True)


@pytest.mark.parametrize("body", [
    lambda v: v.view(torch.float64) + 1,
    lambda v: v.view(torch.complex64) * 1,
    lambda v: torch.view_as_complex(v.view(2, 2)) * 2,
], ids=["float64", "complex64", "view_as_complex"])
def test_odd_offset_by_a_size(body):  # eager raises in the third call
    beside(lambda x, y: body((x * 2)[y.shape[0]:y.shape[0] + 4]), *EVEN, dynamic=True)


THREE = [lambda: [A(20.), R(2), R(9)], lambda: [A(20.), R(3), R(5)]]


@pytest.mark.parametrize("body", [
    lambda x, k, j: x[k:k + 4].copy_(x[j:j + 4]),
    lambda x, k, j: x[k:k + 4].add_(x[j:j + 4]),
    lambda x, k, j: torch.mul(x[k:k + 4], 2, out=x[j:j + 4]),
], ids=["copy_", "add_", "out"])
def test_overlap_by_sizes(body):
    def f(x, y, z):
        w = x * 1
        body(w, y.shape[0], z.shape[0])
        return w
    beside(f, *THREE, dynamic=True)


def test_offset_of_an_argument_view_as_complex():
    beside(lambda x: torch.view_as_complex(x.view(4, 2)) * 2, lambda: [A(40.)[:8]], lambda: [A(40.)[1:9]])


lib = torch.library.Library("memory_beside", "DEF")
lib.define("two(Tensor(a!) x, Tensor(b!) y) -> ()")
lib.impl("two", lambda x, y: (x.add_(1), y.mul_(2), None)[2], "CPU")
lib.define("read(Tensor(a!) x, Tensor y) -> Tensor")
lib.impl("read", lambda x, y: (x.zero_(), y + 1)[1], "CPU")
lib.define("list(Tensor(a!)[] x) -> ()")
lib.impl("list", lambda x: ([t.add_(1) for t in x], None)[1], "CPU")
for name in ("two", "list"):
    lib.impl(name, lambda *a: None, "Meta")
lib.impl("read", lambda x, y: torch.empty_like(y), "Meta")
op = torch.ops.memory_beside


@pytest.mark.eager("writes over an argument", some=True)
@pytest.mark.parametrize("body", [
    lambda y: op.two(y, y),
    lambda y: op.list([y, y]),
    lambda y: op.read(y, y),
    lambda y: op.read(y, y.view(4)),
    lambda y: op.read(y, y.detach()),
], ids=["two", "list", "read", "read a view", "read detached"])
def test_custom_op_given_one_tensor_twice(body):
    def f(x):
        y = x.sin()
        r = body(y)
        return (y, r) if r is not None else y
    beside(f, lambda: [A(4.)], lambda: [A(4.) + 1])


@pytest.mark.compiled("nothing is computed")
@pytest.mark.parametrize("groups", [1, 3])
def test_group_norm_without_channels(groups):
    if call(lambda x: F.group_norm(x, groups), [R(2, 0, 4)])[1]:
        expects.no_kernels("eager raises in every call")  # from 2.15 on
    beside(lambda x: F.group_norm(x, groups), lambda: [R(2, 0, 4)])


def test_names_given_in_the_program():
    f = lambda x: x.rename("a", "b")  # noqa: E731
    if not hasattr(torch.Tensor, "rename"):  # 2.15 has no names
        expects.no_kernels("eager raises in every call")
        return beside(f, lambda: [R(2, 3)])
    expects.eager("gives names to dims")
    assert vitrify.compile(f)(R(2, 3)).names == f(R(2, 3)).names


@pytest.mark.no_kernels("eager raises in every call")
def test_names_that_do_not_agree():
    beside(lambda x: x.rename("a", "b") + x.rename("b", "a"), lambda: [R(2, 3)])
