"""Losses of operands of several types: eager raises, or rounds between its ops."""
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
import compare  # noqa: E402
import expects  # noqa: E402

CLASSES = torch.tensor([0, 1, 2])
PROGRAMS = {
    "nll with weights": lambda x, w: F.nll_loss(x, CLASSES, w[0]), "nll with weights, none": lambda x, w: F.nll_loss(x, CLASSES, w[0], reduction="none"),
    "cross entropy with weights": lambda x, w: F.cross_entropy(x, CLASSES, w[0]), "nll of images": lambda x, w: F.nll_loss(x.reshape(1, 4, 3, 1), CLASSES.reshape(1, 3, 1), w[0]),
    "mse": lambda x, w: F.mse_loss(x, w), "mse, none": lambda x, w: F.mse_loss(x, w, reduction="none"), "huber": lambda x, w: F.huber_loss(x, w), "smooth l1": lambda x, w: F.smooth_l1_loss(x, w),
    "layer norm": lambda x, w: F.layer_norm(x, (4,), w[0]), "layer norm, bias": lambda x, w: F.layer_norm(x, (4,), x[0].detach(), w[0]),
    "logits": lambda x, w: F.binary_cross_entropy_with_logits(x, w.sigmoid()), "logits, none": lambda x, w: F.binary_cross_entropy_with_logits(x, w.sigmoid(), reduction="none"),
    "logits with weights": lambda x, w: F.binary_cross_entropy_with_logits(x, (x.detach() * 2).sigmoid(), w[0]),
    "logits with positive weights": lambda x, w: F.binary_cross_entropy_with_logits(x, (x.detach() * 2).sigmoid(), pos_weight=w[0].abs(), reduction="sum"),
    "logits of columns": lambda x, w: F.binary_cross_entropy_with_logits(x.t(), w.sigmoid().t(), reduction="none"),
}


def run(f, x, w):
    x, w = x.clone().requires_grad_(), w.clone()
    try:
        out = f(x, w)
        return out.detach(), torch.autograd.grad(out.sum(), x)[0]
    except RuntimeError as e:
        return type(e), compare.first_line(e)


@pytest.mark.parametrize("x, w", [(torch.float32, torch.float64), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.float32)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
def test_mixed(name, x, w):
    expects.no_kernels("eager raises for some of the types, and ATen computes others")
    f = PROGRAMS[name]
    compiled = vitrify.compile(f)
    a, b = torch.randn(3, 4).to(x), torch.randn(3, 4).to(w)
    for _ in range(2):
        ours, eager = run(compiled, a, b), run(f, a, b)
        assert isinstance(ours[0], torch.Tensor) == isinstance(eager[0], torch.Tensor), (ours, eager)
        if not isinstance(eager[0], torch.Tensor):
            assert ours == eager
            continue
        for o, e, r in zip(ours, eager, run(f, a.double(), b.double())):
            compare.check_meta("result", o, e)
            compare.check_value("result", o, e, r)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ctc_loss_of_lengths_in_tensors(mode, dtype):
    """Taken apart without a mode, as in inference mode, it reads the lengths."""
    def f(x, targets, lengths, sizes):
        return torch.nn.functional.ctc_loss(x.log_softmax(-1), targets, lengths, sizes)
    args = torch.randn(10, 2, 5), torch.randint(1, 5, (2, 3)), torch.full((2,), 10, dtype=dtype), torch.full((2,), 3, dtype=dtype)
    with mode():
        torch.testing.assert_close(vitrify.compile(f)(*args), f(*args))
