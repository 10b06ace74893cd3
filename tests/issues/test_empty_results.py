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


@pytest.mark.parametrize("program, shape", [
    (lambda x: x.prod(1), (3, 0)), (lambda x: x.prod(), (0, 2)), (lambda x: x.prod(0), (2, 0)),
    (lambda x: torch.nn.functional.pad(x, (1, 2), mode="circular"), (0, 3, 3)), (lambda x: x.as_strided((0, 2), (1, 5), 3) + 1, (4,)),
], ids=["prod along none", "prod of none", "prod to none", "circular pad", "as_strided"])
@pytest.mark.compiled("there is nothing to compute")
def test_gradients_of_nothing(program, shape):
    """The derivative narrowed a dim of no elements to -1, and a view of no elements was taken to reach outside its memory."""
    def both(f):
        x = torch.zeros(shape, requires_grad=True)
        y = f(x * 1)
        return y, *torch.autograd.grad(y, x, torch.ones_like(y))
    for _ in range(2):
        for ours, eager in zip(both(vitrify.compile(program)), both(program)):
            assert torch.equal(ours, eager) and ours.stride() == eager.stride()
    assert not vitrify.counters["eager_calls"]
