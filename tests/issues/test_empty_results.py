"""Strides of results without elements were not learned from what the op gave: svd of a matrix without rows had V's of a matrix with some."""
import pytest
import torch

import vitrify


@pytest.mark.compiled("there is nothing to compute")
@pytest.mark.eager("recorded ", some=True)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3), (0, 0)])
def test_strides_of_empty_results(shape):
    x = torch.zeros(shape)
    compiled, before = vitrify.compile(torch.svd), vitrify.counters["externs_called"]
    for _ in range(2):
        ours, eager = compiled(x), torch.svd(x)
        assert [(t.shape, t.stride()) for t in ours] == [(t.shape, t.stride()) for t in eager]
    assert vitrify.counters["externs_called"] > before
