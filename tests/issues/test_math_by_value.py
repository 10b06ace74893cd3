"""A number's sine, logarithm, ... follows from the number alone: not from what lies beside it in a vector, nor from where in its row it lies.
torch.unique() of values that are read twice tells."""
import pytest
import torch
import vitrify

OPS = {n: getattr(torch, n) for n in "sin cos tan exp exp2 expm1 log log2 log10 log1p tanh sigmoid sinh cosh asinh acosh atanh asin acos atan erf erfc erfinv lgamma sqrt rsqrt reciprocal".split()}
OPS |= {"gelu": torch.nn.functional.gelu, "gelu tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"), "silu": torch.nn.functional.silu, "softplus": torch.nn.functional.softplus,
        "mish": torch.nn.functional.mish, "pow": lambda x: x.abs() ** 1.7, "atan2": lambda x: torch.atan2(x, 0.7 * x + 1), "hypot": lambda x: torch.hypot(x, x + 1), "fmod": lambda x: torch.fmod(x, 0.3),
        "remainder": lambda x: torch.remainder(x, 0.3), "ndtr": torch.special.ndtr}
SPECIAL = [float("inf"), -float("inf"), float("nan"), 1e5, -1e30, 1e-40, 88.9, -104.5, 0.0, -0.0, 12000.5]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", OPS)
def test_value_alone(name, dtype):
    f = vitrify.compile(lambda x: OPS[name](x))
    torch.manual_seed(0)
    plain = torch.cat([torch.randn(40, dtype=torch.float64) * 3, torch.rand(40, dtype=torch.float64)])
    x = torch.cat([plain, torch.tensor(SPECIAL, dtype=torch.float64)]).to(dtype)
    launched = vitrify.counters["kernels_launched"]
    alone = {}  # each in a tensor of its own kind only
    for value, result in zip(x.repeat_interleave(16), f(x.repeat_interleave(16))):
        alone.setdefault(value.double().item().hex(), result)
    assert vitrify.counters["kernels_launched"] > launched
    for size in (91, 30):
        order = torch.randperm(len(x))[:size]
        together = f(x[order])
        expected = torch.stack([alone[v.double().item().hex()] for v in x[order]])
        assert torch.equal(together.nan_to_num(7), expected.nan_to_num(7)) and torch.equal(together.isnan(), expected.isnan()), (name, size, x[order][(together != expected)])


def test_unique_of_what_is_read_twice():
    def f(x):
        return torch.unique(x.sin().unfold(0, 2, 1))

    x = torch.tensor([0.9673721790313721, float("inf")] + [0.5, 0.6, 0.7] * 5)
    launched = vitrify.counters["kernels_launched"]
    with torch.inference_mode():
        assert vitrify.compile(f)(x).shape == f(x).shape
    assert vitrify.counters["kernels_launched"] > launched
