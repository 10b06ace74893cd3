"""Gradients of losses lie as ATen's kernels make them: some are written into contiguous memory, however the input lies."""
import pytest
import torch
import torch.nn.functional as F
import vitrify

LOSSES = {
    "mse": F.mse_loss, "smooth_l1": F.smooth_l1_loss, "huber": F.huber_loss, "l1": F.l1_loss, "soft_margin": lambda x, t, **k: F.soft_margin_loss(x, t.sign(), **k),
    "bce": lambda x, t, **k: F.binary_cross_entropy(x.sigmoid(), t, **k), "bce_with_logits": F.binary_cross_entropy_with_logits, "kl": lambda x, t, **k: F.kl_div(x, t, **k | {"reduction": "sum"}),
    "hinge_embedding": lambda x, t, **k: F.hinge_embedding_loss(x, t.sign(), **k),
}
LAYOUTS = {"permuted": lambda: torch.rand(6, 3).t(), "channels_last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), "a slice": lambda: torch.rand(3, 12)[:, ::2],
           "expanded": lambda: torch.rand(3, 1).expand(3, 6)}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loss", LOSSES)
def test_strides(loss, layout, reduction, dynamic):
    def f(x):
        return LOSSES[loss](x, (x * 0 + 0.3).detach(), reduction=reduction)
    results = []
    for g in (vitrify.compile(f, dynamic=dynamic), f):
        torch.manual_seed(0)
        x = LAYOUTS[layout]().detach().requires_grad_()
        out = g(x)
        results.append((out, *torch.autograd.grad(out, x, torch.ones_like(out))))
    torch.testing.assert_close(*results)
    assert [t.stride() for t in results[0]] == [t.stride() for t in results[1]]
