"""A compiled call holds nothing that comes to hold it: without a backward, and without the garbage collector, all it kept goes with its results."""
import sys
import weakref
from pathlib import Path

import pytest
import torch
import vitrify
from torch.multiprocessing.reductions import StorageWeakRef

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
import gradients  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")


def add_to_input(f, h, w):
    h.add_(f(h, w))


def add_to_a_product(f, h, w):
    h = h * w
    h.add_(f(h, w))


def add_to_a_view(f, h, w):
    h[0].add_(f(h, w)[0])


def add_twice(f, h, w):
    for _ in range(2):
        h.add_(f(h, w))


def copy_back(f, h, w):
    h.copy_(f(h, w))


def write_the_result(f, h, w):
    out = f(h, w)
    out.mul_(w)


def write_the_input_and_return_it(f, h, w):
    h.mul_(f(h, w)).add_(w)


def the_tangent_is_written(f, h, w):
    out = f(h, w)
    t = torch.ones_like(out)
    g, = torch.autograd.grad(out, w, t, create_graph=True, allow_unused=True)
    t.add_(g.sum())


def the_gradient_goes_into_the_input(f, h, w):
    h = h * w
    g, = torch.autograd.grad(f(h, w).sum(), w, create_graph=True)
    h.add_(g)


def an_attribute_of_the_input(f, h, w):
    h.of_step = f(h, w)


def grad_of_a_leaf(f, h, w):
    f(h, w).sum().backward(create_graph=True)
    w.grad = None


PROGRAMS = {"linear": lambda h, w: h + w, "product": lambda h, w: h * w, "matrix": lambda h, w: h @ w, "sine": lambda h, w: (h * w).sin(), "sum": lambda h, w: (h * w).sum(0) * w}
# In eager these hold themselves: the product has saved its operand, which has come to be what follows from the product.
STEPS = [add_to_input, add_to_a_product, add_to_a_view, add_twice, copy_back, write_the_result, write_the_input_and_return_it, the_tangent_is_written,
         the_gradient_goes_into_the_input, grad_of_a_leaf]


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("step", STEPS, ids=[f.__name__ for f in STEPS])
@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_left(name, step):
    compiled = vitrify.compile(PROGRAMS[name], fullgraph=True)
    alive = []
    with gradients.collector_off():
        for _ in range(3):
            h, w = torch.rand(8, 8), torch.rand(8, 8, requires_grad=True)
            refs = [weakref.ref(h), weakref.ref(w), StorageWeakRef(h.untyped_storage()), StorageWeakRef(w.untyped_storage())]
            step(compiled, h, w)
            del h, w
            alive.append([not (r.expired() if isinstance(r, StorageWeakRef) else r() is None) for r in refs])
    assert not any(map(any, alive)), alive
    assert vitrify.counters["eager_calls"] == vitrify.counters["fallbacks"] == 0 and vitrify.counters["kernels_launched"] > 0


def test_a_program_that_writes_its_argument():
    def fn(h, w):
        h.add_(w.sin())
        return h * 2
    compiled = vitrify.compile(fn, fullgraph=True)
    with gradients.collector_off():
        for makes in (lambda w: torch.rand(8), lambda w: w * 2):
            w = torch.rand(8, requires_grad=True)
            h = makes(w)
            refs = [weakref.ref(h), StorageWeakRef(h.untyped_storage())]
            out = compiled(h, w)
            torch.autograd.grad(out.sum(), w, create_graph=True)
            del h, out
            assert refs[0]() is None and refs[1].expired()
    assert vitrify.counters["kernels_launched"] > 0


def test_memory_of_recurrent_steps():
    """As many bytes after two hundred steps as after ten."""
    compiled = vitrify.compile(lambda h, w: torch.tanh(h @ w), fullgraph=True)
    w = torch.rand(64, 64, requires_grad=True)
    alive = []
    with gradients.collector_off():
        for _ in range(20):
            h = torch.rand(64, 64)
            alive.append(StorageWeakRef(h.untyped_storage()))
            for _ in range(10):
                h.add_(compiled(h, w))
            del h
    assert all(a.expired() for a in alive)
    assert vitrify.counters["kernels_launched"] > 0
