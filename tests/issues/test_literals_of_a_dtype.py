"""item() of arithmetic with torch.scalar_tensor: the number is what a tensor of that dtype holds of the literal."""
import beside
import pytest
import torch

T, S = torch, torch.scalar_tensor


@pytest.mark.parametrize("text", ["x * (y * S(1.5, dtype=T.int64)).item()", "x * (y * S(-2.9, dtype=T.int8)).item()", "x * (y * S(2.0, dtype=T.bool)).item()", "x * (y * S(0.1, dtype=T.float16)).item()",
                                  "x * (y * S(0.1, dtype=T.float16).float()).item()", "x * (y.double() * S(0.1, dtype=T.float32)).item()", "x * (y * S(0.1, dtype=T.bfloat16).clone()).item()", "x * (y - S(2.9, dtype=T.uint8)).item()",
                                  "x + 1 if (y * S(1.5, dtype=T.int64)).item() > 4 else x - 1", "x * (y * S(2, dtype=T.int32)).item()", "x * (y * S(3, dtype=T.bool)).item()"])
def test_numbers(text):
    beside.check(beside.program(f"return {text}", S=S, T=T), lambda: [torch.ones(2), torch.tensor(3.0)])
