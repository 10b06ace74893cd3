"""Gradients through some of the results: what the others' would only have been added to needs no derivative of its own (src/torch/absent.h)."""
import bounds
import gradients
import pytest
import torch
import vitrify
from beside import program
from gradients import check, leaves, only

TWO = leaves((2, 3), (2, 3))


def derivatives_taken():
    return vitrify.metrics()["compile_us"].get("derivative", 0) > 0


# Results, those that gradients come through, and whether autograd's formulas have to run once more.
ADDED = [
    ("z = x * y; return z, z.cos().sum()", (1,), False),
    ("z = (x @ y.t()).tanh(); return z.cos().sum(), z", (0,), False),
    ("a = x.exp(); b = a.sin(); c = (b * a).sum(); return a, b, c", (2,), True),  # a's gradient has three terms: the first two decide the layout
    ("a = x.exp(); b = a.sin(); c = (b * b).sum(); return a, b, c", (2,), True),  # b*b: three terms as well
    ("a = x.exp(); b = a.sin(); c = b.cos().sum(); return a, b, c", (2,), False),
    ("a = x.exp(); b = a.sin() * y; c = b.cos(); return c, b, x * y", (0, 2), True),  # x * y has a node of its own
    ("z = x * y; return z, z.sum()", (1,), True),  # an expanded gradient is laid out otherwise than a sum
    ("z = x * y; return z, z.cos().sum()", (0,), True),
    ("z = x * y; return z.t(), z.cos().sum()", (1,), False),
    ("z = x.t() * y.t(); return z.reshape(6), z.cos().sum()", (1,), True),
    ("z = x * 1; return z, x * y", (1,), True),  # what it would be added to is a gradient that the caller gets
]


@pytest.mark.parametrize("text, used, taken", ADDED, ids=[f"{t} {u}" for t, u, _ in ADDED])
def test_absent_tangents(text, used, taken):
    vitrify.reset()
    check(program(text), TWO, then=only(*used), native="forward")
    assert derivatives_taken() == taken


def test_then_through_all_of_them():
    def backwards(out, args):
        z, loss = out
        loss.backward(retain_graph=True)
        first = [a.grad.clone() for a in args]
        torch.autograd.backward((z, loss), gradients.weights((z, loss)))
        return first
    check(program("z = x * y; return z, z.cos().sum()"), TWO, then=backwards)


class PlusSaved(torch.autograd.Function):
    """Its formula adds to the gradient itself: none at all where nothing comes back."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        if a is None:
            return None if b is None else b * 5
        return a + (ctx.saved_tensors[0] if b is None else b * 5)


def test_a_sum_of_a_formula_is_no_sum_of_gradients():
    def f(x, y):
        a, b = PlusSaved.apply(x)
        return a, b * y
    vitrify.reset()
    check(f, TWO, then=only(1))
    assert derivatives_taken()


def test_layouts_are_eagers():
    def f(x, w):
        z = torch.nn.functional.conv2d(x, w).relu()
        return z, z.cos().sum()
    for memory_format in (torch.contiguous_format, torch.channels_last):
        def make():
            return [t.detach().to(memory_format=memory_format).requires_grad_() for t in leaves((2, 4, 8, 8), (4, 4, 3, 3))()]
        check(f, make, then=only(1), values=lambda a, b, **k: torch.testing.assert_close(a, b, **bounds.DEEP_CONVOLUTIONS, **k))


def test_a_loss_beside_what_it_is_made_of():
    """As transformers return them: logits and hidden states beside the loss."""
    torch.manual_seed(0)
    first, last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 5)
    labels = torch.tensor([0, 1, 2, 3])

    def f(x):
        hidden = first(x).relu()
        logits = last(hidden)
        return torch.nn.functional.cross_entropy(logits, labels), logits, hidden
    vitrify.reset()
    check(f, leaves((4, 8)), then=only(0), extra=[*first.parameters(), *last.parameters()])
    assert not derivatives_taken()
