"""What is written through .data between the derivatives of a program: each reads what eager's has saved as it is by its own time, and what the program has
computed of it is as it was."""
import itertools
import sys
from pathlib import Path

import bounds
import pytest
import torch
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
from gradients import leaf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")


def of_a_result(x, w):
    h = (x * w).exp()
    return h, h.sin() * w


def of_a_result_twice(x, w):
    h = (x * w).tanh()
    return h, (h * 2).sin() * w + h.exp()


def of_a_product(x, w):
    h = x @ w.diag()
    return h, (h * 2).sin() * w + h.exp()


def of_arguments(x, w):
    return (w * 3).exp() * x, (x * 2).sin() * (x * 2).cos() * w


def of_two_results(x, w):
    h = (x * w).exp()
    k = h.cos()
    return h, k, (k * h).sin() * w


def of_a_view(x, w):
    h = (x * w).exp().view(2, 4)
    return h, h.t().sin().reshape(-1) * w


PROGRAMS = [of_a_result, of_a_result_twice, of_a_product, of_arguments, of_two_results, of_a_view]
CHANGES = [lambda t: t.data.clamp_(0.1, 0.9), lambda t: t.data.mul_(1.5)]


def derivatives(f, written, change):
    """Three orders; before each something is written: an argument or a result by number from behind, or nothing."""
    x, w = (leaf(8, seed=s, dtype=torch.float64) for s in (1, 2))  # three orders take up much rounding
    results = f(x, w)
    out, grads = results[-1].sum(), []
    for which in written:
        if which:
            change({"x": x, "w": w}[which] if which in "xw" else results[int(which)])
        found = torch.autograd.grad(out, (x, w), create_graph=True)
        grads += [g.detach().clone() for g in found]
        out = sum((g * g).sum() for g in found)
    return grads


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("f", PROGRAMS)
def test_written_through_data_between_derivatives(f, dynamic):
    compiled, before = vitrify.compile(f, dynamic=dynamic), dict(vitrify.counters)
    for written in itertools.product(["", "x", "w", "0", "-1"], ["", "x", "0"], ["", "0"]):
        for change in CHANGES:
            for ours, eager in zip(derivatives(compiled, written, change), derivatives(f, written, change), strict=True):
                torch.testing.assert_close(ours, eager, **bounds.DEEP, msg=lambda m, w=written: f"{w}: {m}")
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"]
    assert vitrify.counters["eager_calls"] == before["eager_calls"] and vitrify.counters["fallbacks"] == before["fallbacks"]
