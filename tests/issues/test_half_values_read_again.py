"""A value of a half type that several read is the number that lies in memory for all of them, as in eager: not the rounded one for some and the unrounded one for others."""
import pytest
import torch
import torch.nn.functional as F
import vitrify

READS = {
    "group_norm": lambda v: F.group_norm(v, 1), "layer_norm": lambda v: F.layer_norm(v, v.shape[1:]), "rms_norm": lambda v: F.rms_norm(v, v.shape[1:]), "batch_norm": lambda v: F.batch_norm(v, None, None, training=True),
    "softmax": lambda v: torch.softmax(v, 1), "sum": lambda v: v.float().sum(1), "a view of it": lambda v: F.layer_norm(v.view(-1, 2, 1).transpose(1, 2), (2,)),
}
VALUES = {"one": lambda x: x / (x.abs() + 1), "shifted": lambda x: x * 0.5 + 1, "heavy": lambda x: torch.erf(x.exp()) + x.sin()}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("size", [(33, 2), (3000, 2), (17, 40)], ids=str)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", READS)
def test_value_read_again(name, value, size, dtype):
    torch.manual_seed(4)
    x = torch.randn(size).to(dtype)
    if name == "a view of it" and size[1] != 2:
        x = x[:, :2].contiguous()

    def f(x):
        v = VALUES[value](x)
        return v, READS[name](v)
    v, read = vitrify.compile(f)(x)
    wide = READS[name](v.double())
    error, ulp = (read.double() - wide).abs(), torch.finfo(dtype).eps * wide.abs().clamp(min=1e-3)
    assert (error <= ulp + 3e-4).all(), error.max()  # x * scale + shift of a group norm cancels, in eager too
