"""The sum of a tensor without dimensions was its element: of -0, where eager's sum starts from 0."""
import pytest
import torch

import vitrify


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["sum", "mean", "nansum"])
def test_sign_of_zero(name, dtype):
    def fn(x):
        return getattr(torch, name)(x), getattr(torch, name)(x * 2 if name == "nansum" else x.relu() * x)
    for value in (-0.0, 0.0, -1.5):
        x = torch.tensor(value, dtype=dtype)
        compiled, before = vitrify.compile(fn), vitrify.counters["kernels_launched"]
        for ours, eager in zip(compiled(x), fn(x)):
            assert torch.equal(ours, eager) and torch.equal(ours.signbit(), eager.signbit())
        assert vitrify.counters["kernels_launched"] > before


def test_a_copy_keeps_the_bits_of_half_values():
    """What is loaded and stored again is not rounded on the way: NaNs keep their payload, as in eager's copies."""
    bits = torch.tensor([0x7FC1, 0x7F81, 0x0001, 0x8001, 0x7F80, 0xFFC0, 0x3F80, 0x8000] * 8, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).reshape(8, 8)
    compiled, before = vitrify.compile(lambda x: torch.cat([x.t(), x])), vitrify.counters["kernels_launched"]
    assert torch.equal(compiled(x).view(torch.int16), torch.cat([x.t(), x]).view(torch.int16))
    assert vitrify.counters["kernels_launched"] > before
