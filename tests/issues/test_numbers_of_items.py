"""Ops that take a number which item() gives, and which changes from call to call: the number is one to the types and to the ways in which ATen computes with it."""
import itertools

import expects
import pytest
import torch
import vitrify

T, NAN, INF = torch.tensor, float("nan"), float("inf")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
VALUES = [3.0, 0.7, 0.5, -0.5, 0.0, 1.0, -200.0, 1e-4, 1.5, NAN, INF]
SUMS = {
    "add": lambda x, y, z, a: torch.add(x, y, alpha=a), "sub": lambda x, y, z, a: torch.sub(x, y, alpha=a), "rsub": lambda x, y, z, a: torch.rsub(x, y, alpha=a),
    "add_": lambda x, y, z, a: x.add_(y, alpha=a), "sub_": lambda x, y, z, a: x.sub_(y, alpha=a), "add a number": lambda x, y, z, a: torch.add(x, 20.5, alpha=a),
    "sub a number": lambda x, y, z, a: torch.sub(x, 20.5, alpha=a), "rsub of a number": lambda x, y, z, a: torch.rsub(x, 20.5, alpha=a),
    "add 0-d": lambda x, y, z, a: torch.add(x, y[0], alpha=a), "add_ 0-d": lambda x, y, z, a: x.add_(y[0], alpha=a), "add to 0-d": lambda x, y, z, a: torch.add(x[0], y, alpha=a),
    "addcmul": lambda x, y, z, a: torch.addcmul(x, y, z, value=a), "addcdiv": lambda x, y, z, a: torch.addcdiv(x, y, z, value=a),
    "addcmul_": lambda x, y, z, a: x.addcmul_(y, z, value=a), "addcdiv_": lambda x, y, z, a: x.addcdiv_(y, z, value=a),
    "foreach": lambda x, y, z, a: torch._foreach_add([x, x], [y, z], alpha=a), "foreach addcdiv_": lambda x, y, z, a: torch._foreach_addcdiv_([x], [y], [z], value=a),
    "lerp": lambda x, y, z, a: torch.lerp(x, y, a), "lerp_": lambda x, y, z, a: x.lerp_(y, a),
}
POWERS = {
    "power": lambda x, a: x**a, "pow_": lambda x, a: x.pow_(a), "of a number": lambda x, a: a**x, "foreach": lambda x, a: torch._foreach_pow([x], a),
    "of sizes": lambda x, a: x ** (x.shape[0] / 8) + a,
}
BOUNDS = {
    "clamp": lambda x, a: x.clamp(min=a), "clamp_": lambda x, a: x.clamp_(min=a), "clamp_ above": lambda x, a: x.clamp_(max=a), "both": lambda x, a: x.clamp_(a, a + 1),
    "clamp_min_": lambda x, a: x.clamp_min_(a), "clamp_max_": lambda x, a: x.clamp_max_(a), "clip_": lambda x, a: x.clip_(a), "foreach": lambda x, a: torch._foreach_clamp_max_([x], a),
}


def outcome(f, given):
    given = [t.clone() for t in given]
    try:
        return None, f(*given), given
    except RuntimeError as e:
        return str(e).partition("\n")[0], None, given


def same(f, calls, runs=False):
    """Several calls, with other numbers each: values, what is written, and errors are eager's. `runs`: all of them run compiled."""
    if not runs:
        expects.eager("takes a number that changes from call to call", "reads a tensor's value", some=True)
        expects.no_kernels("eager raises, whatever the number is")
    compiled, before = vitrify.compile(f), dict(vitrify.counters)
    with torch.no_grad():
        for given in calls:
            (error, out, wrote), (eager_error, eager, eager_wrote) = outcome(compiled, given), outcome(f, given)
            assert error == eager_error
            torch.testing.assert_close((out, wrote), (eager, eager_wrote), equal_nan=True)
    did = {name: n - before[name] for name, n in vitrify.counters.items()}
    assert not runs or (did["eager_calls"] == 0 and did["compiled_calls"] == len(calls) and did["kernels_launched"] > 0)


@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("types", [(F32, F32), (F16, F16), (BF16, BF16), (F32, F16), (F32, BF16), (F64, F32), (F16, F32), (torch.int64, F32), (F32, torch.int64), (F32, torch.bool)], ids=lambda t: "-".join(str(x)[6:] for x in t))
def test_sums_and_products(op, types):
    f, runs = SUMS[op], all(t.is_floating_point for t in types) and (types[0] == types[1] or "lerp" not in op)  # of mixed types it raises
    x, y, z = T([1.0, 2.0, 0.0, 1000.0]), T([600.0, 30.0, 0.5, 60000.0]), T([600.0, 1.0, 0.25, 2.0])  # no differences of what is almost the same
    same(lambda x, y, z, s: f(x, y, z, s.item()), [(x.to(types[0]), y.to(types[1]), z.to(types[1]), T(v)) for v in VALUES], runs)
    same(lambda x, y, z, s: f(x, y, z, -s.sum().item()), [(x.to(types[0]), y.to(types[1]), z.to(types[1]), T([v, 1.0], dtype=F64)) for v in VALUES[:8]])


def test_sums_run_compiled():
    def step(p, m, v, s):
        return p.addcdiv_(m, v, value=-s.item()).add_(m, alpha=s.item())
    p, m, v = torch.rand(64), torch.rand(64, dtype=BF16), torch.rand(64, dtype=BF16) + 1
    compiled = vitrify.compile(step)
    for s in (T(0.1), T(0.3)):
        torch.testing.assert_close(compiled(p.clone(), m, v, s), step(p.clone(), m, v, s))


@pytest.mark.parametrize("op", POWERS)
@pytest.mark.parametrize("dtype", [F32, F64, F16, BF16, torch.complex64, torch.int64], ids=lambda t: str(t)[6:])
def test_powers(op, dtype):
    f = POWERS[op]
    x = T([-INF, -0.0, 0.0, 4.0, INF, NAN, 0.3, -8.0])
    x = x.nan_to_num(5, 7, 9) if dtype == torch.int64 else x[1:4] if dtype.is_complex else x
    same(lambda x, s: f(x, s.item()), [(x.to(dtype), T(v)) for v in VALUES], dtype.is_floating_point)
    same(lambda x, s: f(x, s.item()), [(x[:n].to(dtype), T(2.0)) for n in (3, 4, 8, 2)])
    same(lambda x, s: f(x, s.sum().item()), [(x.to(dtype), T([v, 0.0])) for v in VALUES])


@pytest.mark.parametrize("op", BOUNDS)
@pytest.mark.parametrize("dtype", [F32, BF16, torch.int64, torch.uint8, torch.bool], ids=lambda t: str(t)[6:])
def test_bounds(op, dtype):
    f = BOUNDS[op]
    same(lambda x, s: f(x, s.item()), [(T([0, 1, 2, 3]).to(dtype), T(v)) for v in (1.5, 2.5, 0.25, -2.0, NAN, INF)], dtype.is_floating_point)


@pytest.mark.parametrize("op,y", itertools.product(["sub", "rsub", "sub_", "addcdiv"], [T([True, False]), T([2, 3])]))
def test_what_eager_refuses(op, y):
    f = SUMS[op]
    same(lambda x, s: f(x, y, y, s.item()), [(T([1.0, 2.0]), T(v)) for v in (3.0, 2.0)])


@pytest.mark.parametrize("op", ["add_", "sub_", "addcmul_", "addcdiv_", "lerp_"])
def test_operands_that_overlap_what_is_written(op):
    f = SUMS[op]
    same(lambda x, s: f(x[1:], x[:-1], x[:-1], s.item()), [(torch.arange(1.0, 9), T(v)) for v in (3.0, 2.0)])


def test_what_is_almost_a_square_root():
    x = T([-INF, -0.0, 0.0, 4.0, INF])
    for dtype in (F32, BF16, F16, F64):
        same(lambda x, s: x ** s.item(), [(x.to(dtype), T(v, dtype=F64)) for v in (0.5 + 1e-12, 0.5, -0.5 - 1e-12, 0.7 - 0.2)], True)


def test_custom_ops_whose_overload_computes_otherwise():
    lib = torch.library.Library("vt_numbers", "FRAGMENT")  # noqa: TOR901
    lib.define("h_(Tensor(a!) x, Scalar a) -> Tensor(a!)")
    lib.define("h_.Tensor(Tensor(a!) x, Tensor a) -> Tensor(a!)")
    lib.impl("h_", lambda x, a: x.mul_(a), "CPU")
    lib.impl("h_.Tensor", lambda x, a: x.mul_(a).add_(1000), "CPU")
    for name in ("h_", "h_.Tensor"):
        lib.impl(name, lambda x, a: x, "Meta")
    same(lambda x, s: torch.ops.vt_numbers.h_(x, s.item()) + 1, [(torch.arange(3.0), T(v)) for v in (0.3, 0.7)])
