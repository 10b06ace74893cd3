"""A 0-d tensor of a wider type beside halves: eager rounds it to the half type first, but for the second operand of products and quotients. A dividend, and the weight of lerp(), were taken as they are."""
import itertools

import beside
import expects
import pytest
import torch
import vitrify

PROGRAMS = {"quotient of it": lambda x, w: w / x, "quotient by it": lambda x, w: x / w, "product": lambda x, w: x * w, "product of it": lambda x, w: w * x, "floor": lambda x, w: torch.div(w, x, rounding_mode="floor"), "floor by it": lambda x, w: torch.div(x, w, rounding_mode="floor"),
            "trunc": lambda x, w: torch.div(w, x, rounding_mode="trunc"), "trunc by it": lambda x, w: torch.div(x, w, rounding_mode="trunc"), "lerp": lambda x, w: torch.lerp(x, x * 4, w), "lerp_": lambda x, w: x.clone().lerp_(x * 4, w), "sum": lambda x, w: x + w, "difference": lambda x, w: w - x,
            "floor_divide": lambda x, w: w // x, "floor_divide by it": lambda x, w: x // w, "addcmul": lambda x, w: torch.addcmul(x, x, w), "addcdiv": lambda x, w: torch.addcdiv(x, x, w), "lerp of a number": lambda x, w: torch.lerp(x, x * 4, 0.1), "foreach": lambda x, w: torch._foreach_div([x], w)[0],
            "one of each": lambda x, w: w.to(x.dtype) / x}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers(name, wide, dtype):
    f, numbers = PROGRAMS[name], itertools.cycle([0.1, 7e4, 1e-8, 2049.0, 1 / 3, -3.3])
    compiled = vitrify.compile(f, fullgraph=True)
    steps = torch.finfo(dtype).eps if name.startswith("floor") else 0  # ATen's rounds each of its steps
    x = torch.tensor([1.0, 0.5, -2.0, 3.0, 0.1, 100.0, 1000.0, -7.0, 1.001, 33.0, -0.7, 0.33]).to(dtype)
    with torch.no_grad():
        for _ in range(6):
            w = torch.tensor(next(numbers)).to(wide)
            torch.testing.assert_close(compiled(x, w), f(x, w), rtol=steps, atol=0, equal_nan=True)


@pytest.mark.parametrize("read", ["unread", "read", "part"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float16, torch.float32, torch.int64])
@pytest.mark.parametrize("value", [300, 3, 1e6, -1])
def test_a_fill_that_does_not_fit(value, dtype, read):
    m = torch.tensor([True, False])
    f = {"unread": lambda x, v: (x.masked_fill(m, v), x + 1)[1], "read": lambda x, v: x.masked_fill(m, v) + 1, "part": lambda x, v: x.masked_fill(m, v)[:1] + 1}[read]

    def told(run):
        try:
            return run(torch.tensor([1, 2], dtype=dtype), torch.tensor(value)).tolist()
        except RuntimeError as e:
            return str(e).partition("\n")[0]
    with torch.no_grad():
        eager = told(f)
        if isinstance(eager, str):
            expects.no_kernels("the program raises")
        assert told(vitrify.compile(f, fullgraph=True)) == eager


def test_an_average_in_half():
    """An exponential moving average of halves whose rate is a tensor."""
    beside.check(lambda x, y: x.lerp_(y, torch.tensor(0.1)), lambda: [torch.full((5,), 2.0).half(), torch.full((5,), 7.0).half()])
