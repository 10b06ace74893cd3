"""Views as arguments or as captured tensors, whose history is not what the placeholder has: written without gradients, made without them, of a base that has a gradient; and
captured tensors with a history, of which a program takes gradients or that it writes. Gradients went missing or past them, and captures crashed or freed eager's nodes."""
import pytest
import torch
import vitrify

WRITES = {
    "mul_": lambda t: t.mul_(1.5), "detached": lambda t: t.detach().mul_(1.5), "a part": lambda t: t[:1].add_(1), "twice": lambda t: (t.add_(1), t.mul_(2)), "data": lambda t: t.data.mul_(1.5),
}
GIVEN = {"of a leaf": lambda w: w[1:], "of a value": lambda w: (w * 1)[1:], "of a view": lambda w: w.view(3, 1)[1:].view(2), "no view": lambda w: w[1:] * 1}


@pytest.mark.eager("a view that needs gradients, without them", some=True)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", WRITES)
def test_written_without_gradients(name, given):
    def f(t, x):
        with torch.no_grad():
            WRITES[name](t)
        return t * x
    compiled, told = vitrify.compile(f), []
    for g in (f, compiled):
        for kind in (given, "no view", given):
            w, x = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
            t = GIVEN[kind](w)
            told.append([None if o is None else o.tolist() for o in torch.autograd.grad(g(t, x).sum(), [t, x, w], allow_unused=True)])
    assert told[3:] == told[:3]


TAKES = {
    "grad": lambda t, x: torch.autograd.grad((t * x).sum(), t, allow_unused=True)[0], "not allowed": lambda t, x: torch.autograd.grad((t * x).sum(), t)[0], "create_graph": lambda t, x: torch.autograd.grad((t * x).sum(), [t, x], create_graph=True, allow_unused=True)[1],
    "backward": lambda t, x: ((t * x).sum().backward(), x.detach() * 2)[1], "backward to": lambda t, x: ((t * x).sum().backward(inputs=[t, x]), x.detach() * 2)[1], "none": lambda t, x: t * x,
}


@pytest.mark.eager("it is a view that gets none", "appears to not have been used", "gradients that are there from the first call on", some=True)
@pytest.mark.parametrize("first", ["leaf", "view"])
@pytest.mark.parametrize("name", TAKES)
def test_a_view_made_without_gradients(name, first):
    told = []
    for compiles in (False, True):
        f = vitrify.compile(TAKES[name]) if compiles else TAKES[name]
        for kind in (first, "view", "leaf", "view"):
            w, x = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
            with torch.no_grad():
                t = w[1:] if kind == "view" else torch.ones(2, requires_grad=True)
            try:
                out = f(t, x)
                told.append(out if out is None else out.tolist())
                if name == "none":
                    out.sum().backward()
            except RuntimeError as e:
                told.append(str(e)[:60])
            told.append([None if o.grad is None else o.grad.tolist() for o in (t, x, w)])
    assert told[8:] == told[:8]


@pytest.mark.eager("it may look at the .grad of a tensor that is not a leaf", "reads the .grad", "meets a tensor", "which retains its gradient", "reads or sets a .grad", some=True)
@pytest.mark.parametrize("name", ["read", "zeroed", "a base's", "add_", "copy_"])
def test_of_a_captured_tensor_with_a_history(name):
    told = []
    for compiles in (False, True):
        w = torch.ones(3, requires_grad=True)
        h = w[1:] if name == "a base's" else w * 2
        h.retain_grad()

        def f(x):
            if name == "read":
                return (x * 1 if h.grad is None else h.grad * 1), h * x  # noqa: B023
            if name == "zeroed":
                if h.grad is not None:  # noqa: B023
                    h.grad.zero_()  # noqa: B023
                return h * x,  # noqa: B023
            if name == "a base's":
                return h.detach() * x + (h._base.grad.sum() if h._base.grad is not None else 0),  # noqa: B023
            return getattr(h, name)(x),  # noqa: B023
        f = vitrify.compile(f) if compiles else f
        for n in range(3):
            if name == "a base's":
                w.grad = torch.full((3,), float(n)) if n else None
            out = f(torch.ones(2 if name == "a base's" else 3))
            if out[-1].requires_grad:
                out[-1].sum().backward(retain_graph=True)
            told.append([t.tolist() for t in out] + [None if t.grad is None else t.grad.tolist() for t in (h, w)])
    assert told[3:] == told[:3]


@pytest.mark.eager("goes through the node of what it finds", some=True)
@pytest.mark.parametrize("make", [lambda w: w * w, lambda w: w * 2, lambda w: w.exp()], ids=["square", "double", "exp"])
def test_a_refused_capture_frees_no_history(make):
    told = []
    for compiles in (False, True):
        w = torch.ones(3, requires_grad=True)
        h = make(w)

        def f(x):
            (h * x).sum().backward(inputs=[h, x])  # noqa: B023
            return x.detach() * 2
        f = vitrify.compile(f) if compiles else f
        for _ in range(2):
            try:
                told.append(f(torch.ones(3, requires_grad=True)).tolist())
            except RuntimeError as e:
                told.append(str(e)[:40])
            told.append(None if w.grad is None else w.grad.tolist())
    assert told[4:] == told[:4]


@pytest.mark.eager("it registers a hook on a tensor")
def test_a_hook_on_a_base_is_registered_once():
    for compiles in (False, True):
        w = torch.ones(3, requires_grad=True)
        t = w[1:]
        f = lambda x: (t._base.register_hook(lambda g: g * 2), t * x)[1]  # noqa: B023, E731
        (vitrify.compile(f) if compiles else f)(torch.ones(2)).sum().backward()
        assert w.grad.tolist() == [0, 2, 2]
