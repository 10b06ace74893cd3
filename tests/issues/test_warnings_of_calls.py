"""Warnings come with the call that is captured (docs/differences.md): a filter that makes errors of them raises there as eager does, and nothing is kept of that call."""
from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
import vitrify


def own(x, y):
    warnings.warn("mine", stacklevel=2)
    return x * y


PROGRAMS = {"own": own, "of torch's Python code": lambda x, y: F.softmax(x * y), "of an op": lambda x, y: F.mse_loss(x, y)}


@pytest.mark.parametrize("f", PROGRAMS.values(), ids=PROGRAMS)
def test_captured_call_warns_or_raises(f):
    x, y = torch.randn(3, 4), torch.randn(1, 4)
    compiled = vitrify.compile(f)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning) as said:
            compiled(x, y)
    with pytest.warns(UserWarning) as once:
        given = compiled(x, y)
    assert [str(w.message) for w in once] == [str(said.value)]
    before = vitrify.counters["kernels_launched"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.allclose(given, f(x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(compiled(x, y), given)
    assert vitrify.counters["kernels_launched"] > before
