"""Infinities, NaN, zeros of both signs, huge and tiny values through every elementwise op, alone and behind abs and neg (which compilers like to fold)."""
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import compare  # noqa: E402

INF, NAN = float("inf"), float("nan")
VALUES = [INF, -INF, NAN, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 1e-3, -1e-3, 1e-38, -1e-38, 1e-45, 1e30, -1e30, 3.4e38, -3.4e38, 88.9, -88.9, 104.0, -104.0,
          9.0, -9.0, 5.5, -5.5, 20.1, -20.1, 1e7, -1e7, 3.0, -3.0, 6.0, -6.0]
UNARY = {
    name: getattr(torch, name) for name in
    "abs neg exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc sigmoid sqrt rsqrt reciprocal floor ceil round trunc frac "
    "sign square isnan isinf isfinite nan_to_num logit signbit positive deg2rad sgn".split()
} | {
    name: getattr(F, name) for name in
    "relu relu6 gelu silu mish softplus elu selu celu leaky_relu hardtanh hardswish hardsigmoid softshrink hardshrink tanhshrink softsign logsigmoid".split()
} | {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "threshold": lambda x: F.threshold(x, 0.5, 2.0), "clamp": lambda x: torch.clamp(x, -1, 2),
    "clamp_min": lambda x: torch.clamp_min(x, 0), "clamp_max": lambda x: torch.clamp_max(x, 0), "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "fmax": lambda x: torch.fmax(x, torch.zeros_like(x)), "fmin": lambda x: torch.fmin(x, torch.zeros_like(x)), "pow2": lambda x: x ** 2, "pow3": lambda x: x ** 3,
    "pow_half": lambda x: x ** 0.5, "pow_neg": lambda x: x ** -1.5, "base2": lambda x: 2.0 ** x, "to_bf16": lambda x: x.to(torch.bfloat16), "to_f16": lambda x: x.to(torch.float16),
    "floordiv": lambda x: torch.div(x, 3.0, rounding_mode="floor"), "remainder": lambda x: torch.remainder(x, 3.0), "fmod": lambda x: torch.fmod(x, -3.0), "gt": lambda x: x > 0,
    "where": lambda x: torch.where(x > 0, x, -x), "xlogy": lambda x: torch.xlogy(x, x), "copysign": lambda x: torch.copysign(torch.ones_like(x), x), "lerp": lambda x: torch.lerp(x, -x, 0.25),
    "hypot": lambda x: torch.hypot(x, x), "atan2": lambda x: torch.atan2(x, -x), "logaddexp": lambda x: torch.logaddexp(x, x), "max": lambda x: x.amax(-1), "min": lambda x: x.amin(-1),
    "softmax": lambda x: torch.softmax(x, -1), "sum": lambda x: x.sum(-1), "argmax": lambda x: x.argmax(-1), "heaviside": lambda x: torch.heaviside(x, torch.full_like(x, 0.25)),
}
BEFORE = {"": lambda x: x, "abs": torch.abs, "-abs": lambda x: -torch.abs(x)}


@pytest.mark.sweep(5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", sorted(UNARY))
def test_special_values(name, dtype):
    op = UNARY[name]
    values = [v for v in VALUES if v == v or name not in ("signbit", "copysign")]  # the sign of a NaN is nobody's promise
    plain = torch.tensor(values, dtype=dtype)
    with torch.no_grad():
        for before, f in BEFORE.items():
            # Each value alone in a vector's tail, and in a full vector: eager's and our own kernels differ between the two.
            for x in (plain, plain.repeat(3).view(3, -1).t()) if not before else (plain.repeat(2)[:67],):
                try:
                    compare.compare(lambda x: op(f(x)), (x,))
                except compare.Mismatch as wrong:
                    pytest.fail(f"{name} of {before or 'x'} {tuple(x.shape)}: {wrong}")
                finally:
                    vitrify.reset()


def test_nan_through_a_select_on_a_maximum():
    """LLVM 19 folded the comparison into the maximum and let the NaN pass."""
    def f(x):
        y = torch.relu(x)
        return torch.where(y > 0, y, 0), torch.where(torch.clamp(x, max=0.5) < 0.5, torch.clamp(x, max=0.5), 0.5)
    x = torch.tensor([0.9, float("nan"), -float("inf"), 0.1, -0.0] * 7)
    launched = vitrify.counters["kernels_launched"]
    with torch.no_grad():
        for want, got in zip(f(x), vitrify.compile(f, fullgraph=True)(x)):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert vitrify.counters["kernels_launched"] > launched


# Where eager's own vectors and tails differ for NaN, no element but NaN is compared, and NaN in a vector alone.
DIFFERENTIABLE = sorted(set(UNARY) - set("isnan isinf isfinite signbit gt to_f16 to_bf16 argmax heaviside floordiv max min softmax sum hypot logaddexp atan2 sinh cosh positive".split()))


def gradients(name, values, dtype):
    found = []
    for f in (vitrify.compile(UNARY[name]), UNARY[name]):
        x = torch.tensor(values, dtype=dtype).repeat_interleave(64).requires_grad_()
        y = f(x)
        y.backward(torch.full_like(y, 0.5))
        found.append(x.grad)
    vitrify.reset()
    return found


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_at_special_values(name, dtype):
    """Infinities where eager's are, zeros where eager's are, and the rest near."""
    ours, eager = gradients(name, [v for v in VALUES if v == v], dtype)
    torch.testing.assert_close(ours, eager, equal_nan=True)


@pytest.mark.sweep(5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_at_nan(name, dtype):
    """Of the vectors of ATen's loops: NaN, or what a comparison that fails leaves."""
    ours, eager = gradients(name, [NAN], dtype)
    assert compare.bits_equal(ours, eager), (ours[0], eager[0])
