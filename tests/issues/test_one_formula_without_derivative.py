"""Gradients of gradients: where one of them cannot be differentiated, the others can; batches of gradients that repeat their elements."""
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch.autograd import grad

ONE_FAILS = {"pdist": (lambda x, w: F.pdist(x) * w, (4, 4), (6,)), "gamma": (lambda x, w: torch._standard_gamma(x + 1) * w, (4,), (4,))}


def both(f, use):
    said = []
    for g in (f, vitrify.compile(f)):
        torch.manual_seed(0)
        said.append(use(g))
    assert vitrify.counters["eager_calls"] == 0
    return said


@pytest.mark.parametrize("f, of_x, of_w", ONE_FAILS.values(), ids=ONE_FAILS)
def test_one_of_two(f, of_x, of_w):
    def use(g):
        x, w = torch.rand(of_x, requires_grad=True), torch.rand(of_w, requires_grad=True)
        qx, qw = grad(g(x, w).sum(), (x, w), create_graph=True)
        there = grad(qw.sum(), x, retain_graph=True)[0]
        try:
            return there, grad(qx.sum(), x)[0]
        except RuntimeError as e:
            return there, str(e).split("\n")[0]
    (a, told), (b, tells) = both(f, use)
    torch.testing.assert_close(a, b)
    if isinstance(told, torch.Tensor):  # pdist has one from 2.15 on
        torch.testing.assert_close(tells, told)
    else:
        assert told == tells and "not implemented" in told


def test_batches_of_gradients_that_repeat():
    def use(g):
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        q, = grad(g(x, w), x, torch.randn(3, 4, 4), is_grads_batched=True, create_graph=True)
        return q.stride(), grad(q.sum(), w)[0]
    (strides, a), (ours, b) = both(lambda x, w: x.sum() * w, use)
    assert strides == ours
    torch.testing.assert_close(a, b)
