"""What a program does to the history of a tensor by which no op is run: detach_(), retain_grad(), requires_grad_(). Of arguments it was lost, and a capture left the
program's own tensors detached."""
import expects
import pytest
import torch
import vitrify
from torch import nn

PROGRAMS = {
    "retained": lambda h, w: (h.retain_grad(), h * w)[1], "retained and returned": lambda h, w: (h.retain_grad(), h * w, h)[1], "retained later": lambda h, w: (lambda y: (h.retain_grad(), y)[1])(h * w),
    "detached": lambda h, w: (h.detach_(), h * w)[1], "detached and a leaf": lambda h, w: (h.detach_(), h.requires_grad_(), h * w)[2], "a view of before": lambda h, w: (lambda v: (h.detach_(), v * w[:2])[1])(h[:2]),
    "written and detached": lambda h, w: (h.mul_(w), h.detach_(), h * w)[2], "detached and written": lambda h, w: (h.detach_(), h.mul_(w), h * 2)[2], "used and detached": lambda h, w: (lambda y: (h.detach_(), y)[1])(h * w),
    "left as it is": lambda h, w: h * w,
}


@pytest.mark.eager("reads by detach_() the history", "reads retain_grad", "shares memory with input", "detaches a tensor in place", "requires_grad of a tensor", "an argument that it also reaches by itself", "one of the variables", "retains the gradient", some=True)
@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("way", ["argument", "captured"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_of_before_the_call(name, way, leaf):
    seen = []
    for compiles in (False, True):
        told, state, w = [], {}, torch.full((3,), 0.5).requires_grad_()
        x = torch.arange(1.0, 4.0).requires_grad_()
        state["h"] = torch.zeros(3) + 1 if leaf else x * 2
        f = (lambda h: PROGRAMS[name](h, w)) if way == "argument" else (lambda h: PROGRAMS[name](state["h"], w))  # noqa: B023
        f = vitrify.compile(f) if compiles else f
        for _ in range(2):
            h = state["h"]
            for run in (lambda: f(h).sum().backward(retain_graph=True), lambda: (h * 1).sum().backward(retain_graph=True)):  # noqa: B023
                try:
                    run()
                except RuntimeError as e:
                    told.append(str(e)[:40])
                told += [h.requires_grad, h.is_leaf, h.retains_grad, h.tolist(), None if x.grad is None else x.grad.tolist(), None if w.grad is None else w.grad.tolist()]
                told.append(h.grad.tolist() if (h.is_leaf or h.retains_grad) and h.grad is not None else None)
            state["h"] = x * 2
        seen.append(told)
    assert seen[1] == seen[0]


MADE = {
    "a view of before it was written": lambda x, w: (lambda c: (lambda v: (c.mul_(2), c.detach_(), (v, c))[2])(c[0]))(x * w), "a part of that": lambda x, w: (lambda c: (lambda v: (c.mul_(2), c.detach_(), v.chunk(2)[0])[2])(c[0]))(x * w),
    "a view of a leaf": lambda x, w: (x * w).detach().requires_grad_().view(-1), "of a new one": lambda x, w: (torch.ones(3).requires_grad_().view(1, 3), x * w), "of what is detached": lambda x, w: (lambda c: (c.detach_(), c.requires_grad_(), c[:1])[2])(x * w),
    "of an argument's": lambda x, w: (x.detach().requires_grad_()[0], x * w), "without one": lambda x, w: (x * w).detach().view(-1),
}


@pytest.mark.eager("returns a view of a leaf, which it makes", some=True)
@pytest.mark.parametrize("name", MADE)
def test_views_of_leaves(name):
    seen = []
    for f in (MADE[name], vitrify.compile(MADE[name])):
        told = []
        for _ in range(2):
            x, w = torch.ones(3, 4).requires_grad_(), torch.full((3, 4), 0.5).requires_grad_()
            out = f(x, w)
            for t in out if isinstance(out, tuple) else (out,):
                told += [t.requires_grad, t.is_leaf, t.detach().tolist()]
                for run in (lambda: t.sum().backward(), lambda: t.mul_(2)):  # noqa: B023
                    try:
                        run()
                    except RuntimeError as e:
                        told.append(str(e)[:60])
            told += [x.grad if x.grad is None else x.grad.tolist(), w.grad if w.grad is None else w.grad.tolist()]
        seen.append(told)
    assert seen[1] == seen[0]


LEAVES = {
    "all of it": lambda x: x.view(-1).requires_grad_(), "a part": lambda x: (lambda v: ((v * v).sum(), v))(x[1:].requires_grad_()), "detached": lambda x: x.detach().requires_grad_(), "beside a value": lambda x: (x * 2, x[:2].requires_grad_()),
}


@pytest.mark.eager("returns a leaf that needs gradients, which it makes")
@pytest.mark.parametrize("way", ["given", "captured", "without gradients"])
@pytest.mark.parametrize("name", LEAVES)
def test_views_that_are_leaves(name, way):
    seen = []
    for compiles in (False, True):
        told, x = [], torch.ones(3)
        f = LEAVES[name] if way != "captured" else (lambda: LEAVES[name](x))  # noqa: B023
        f = vitrify.compile(f) if compiles else f
        for _ in range(2):
            with torch.set_grad_enabled(way != "without gradients"):
                out = f() if way == "captured" else f(x)
            out = out if isinstance(out, tuple) else (out,)
            told += [(t.requires_grad, t.is_leaf, t._is_view(), t.tolist()) for t in out]
            if out[0].requires_grad:
                out[0].sum().backward()
                told.append([None if t.grad is None or not t.is_leaf else t.grad.tolist() for t in out])
        seen.append(told)
    assert seen[1] == seen[0]


@pytest.mark.eager("of another inference mode than the call's", some=True)
@pytest.mark.parametrize("grad", [True, False])
def test_results_of_another_inference_mode(grad):
    def f(x):
        with torch.inference_mode(False):
            return x * 2
    for g in (f, vitrify.compile(f)):
        for _ in range(2):
            x = torch.ones(2, requires_grad=grad)
            with torch.inference_mode():
                out = g(x)
            assert not out.is_inference() and out.requires_grad == grad
            if grad:
                out.sum().backward()
                assert x.grad.tolist() == [2.0, 2.0]


RESHAPED = {
    "a dim more": lambda y: y.unsqueeze_(1), "and back": lambda y: y.unsqueeze_(0).squeeze_(0), "twice": lambda y: y.transpose_(0, 1).transpose_(0, 1),
}


@pytest.mark.parametrize("make", [lambda x: x * 2, lambda x: x.clone(), lambda x: torch.zeros(3, 4) + x], ids=["product", "copy", "sum"])
@pytest.mark.parametrize("name", RESHAPED)
def test_memory_of_views_of_what_is_reshaped(name, make):
    def f(x):
        return RESHAPED[name](make(x))[1:]
    compiled = vitrify.compile(f, fullgraph=True)
    for _ in range(2):
        ours, eager = (g(torch.ones(3, 4).requires_grad_()) for g in (compiled, f))
        assert (ours.storage_offset(), ours.untyped_storage().nbytes(), ours._is_view(), ours._base.shape) == (eager.storage_offset(), eager.untyped_storage().nbytes(), eager._is_view(), eager._base.shape)


@pytest.mark.parametrize("view", [lambda v: v.view_as(v), lambda v: v[1:], lambda v: v[:]], ids=["view_as", "part", "whole"])
def test_a_view_of_a_value_becomes_a_leaf(view):
    """Made without gradients, and then told to need them: a backward gives it its own."""
    expects.eager("returns a leaf that needs gradients, which it makes")

    def told(compile):
        w = nn.Parameter(torch.ones(3))

        def program():
            v = torch.lerp(torch.ones(3), w, 0.3)
            with torch.no_grad():
                part = view(v)
            return part.requires_grad_()
        r = compile(program)()
        r.sum().backward()
        return r.grad.tolist(), w.grad, r.is_leaf
    assert told(vitrify.compile) == told(lambda f: f)
