"""A dispatch mode or anomaly detection that is on around a backward, and was not around the call: derivatives that are taken then were refused, or looked at values of placeholders."""
import contextlib

import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


class Counts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def both():
    with Counts(), torch.autograd.detect_anomaly(check_nan=True):
        yield


AROUND = {"anomaly": torch.autograd.detect_anomaly, "mode": Counts, "both": both}
PROGRAMS = {
    "sin": lambda x, w: ((x * w).sin(),), "product": lambda x, w: ((x * w).prod(1),), "two": lambda x, w: ((x * w).sin(), (x * w).exp() @ w),
    "one behind another": lambda x, w: (lambda y: (y, (y * w).cos()))((x * w).exp()),
    "dropout": lambda x, w: (F.dropout(x * w, 0.5).sin(),), "checkpoint": lambda x, w: (checkpoint(lambda x: F.dropout((x * w).sin(), 0.5), x, use_reentrant=False),),
}


def total(tensors):
    return sum(t.square().sum() for t in tensors)


def at_once(f, around):
    x, w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    loss = total(f(x, w))
    with around():
        loss.backward()
    return x.grad, w.grad


def later(f, around):
    x, w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    out = f(x, w)
    with around():
        a = torch.autograd.grad(out[0].sum(), x, retain_graph=True)
        return *a, *torch.autograd.grad(out[-1], w, torch.arange(out[-1].numel()).view(out[-1].t().shape).t().double(), allow_unused=True)


def again(f, around):
    x, w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    loss = total(f(x, w))
    with around():
        first = torch.autograd.grad(loss, (x, w), create_graph=True)
        return *first, *torch.autograd.grad(total(first), (x, w))


def from_then_on(f, around):
    x, w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    first = torch.autograd.grad(total(f(x, w)), (x, w), create_graph=True)
    with around():
        return *first, *torch.autograd.grad(total(first), (x, w))


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("how", [at_once, later, again, from_then_on], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.eager("op by op: a mode sees", some=True)
def test_around_the_backward_only(name, how, around, dynamic):
    compiled = vitrify.compile(PROGRAMS[name], fullgraph=True, dynamic=dynamic)
    for _ in range(2):
        results = []
        for f in (compiled, PROGRAMS[name]):
            torch.manual_seed(0)
            results.append([t.detach() for t in how(f, AROUND[around]) if t is not None])
            assert torch.is_anomaly_enabled() is False
        torch.testing.assert_close(*results)


@pytest.mark.eager("op by op: a mode sees", some=True)
def test_a_mode_sees_what_eager_calls():
    f = lambda x, w: (x @ w).tanh()  # noqa: E731
    seen = []
    for g in (vitrify.compile(f, fullgraph=True), f):
        x, w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        y = g(x, w)
        with Counts() as mode:
            y.backward(torch.ones_like(y))
        seen.append([op for op in mode.seen if op in (torch.ops.aten.mm.default, torch.ops.aten.tanh_backward.default)])
    assert len(seen[0]) == 3 and seen[0] == seen[1]


@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1)])
@pytest.mark.eager("op by op: a mode sees", some=True)
def test_strides_of_what_was_written_through_a_view(order, dynamic):
    """Eager's gradient lies as what was written did, however its tangent lies: ops that run one by one are given it so."""
    def f(x):
        x = x.clone()
        x.mT.add_(1)
        return x

    compiled = vitrify.compile(f, fullgraph=True, dynamic=dynamic)
    for n in (4, 4, 7):
        shape = [6, 5, n]
        tangent = torch.randn([shape[d] for d in order]).permute(*sorted(range(3), key=lambda d: order[d]))
        seen = []
        for g in (compiled, f):
            x = torch.randn(6, n, 5).mT.requires_grad_()
            y = g(x)
            with Counts():
                seen.append(torch.autograd.grad(y, x, tangent)[0])
        assert torch.equal(*seen) and seen[0].stride() == seen[1].stride()


def test_modes_of_torchs_own_end_where_they_began():  # composites of inference tensors are taken apart with our mode below theirs
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

    def f(x):
        with FakeTensorMode(allow_non_fake_inputs=True):
            n = torch.einsum("ij,kj->ik", torch.empty(3, 4), torch.empty(5, 4)).shape
        return (x * 2).sin() + n[1]

    x, compiled = torch.randn(3, 4), vitrify.compile(f)
    with torch.inference_mode():
        want, got = f(x), compiled(x)
    torch.testing.assert_close(got, want)
    assert modes() == []
