"""Hooks on a weight, and a tensor that retains its gradient, see what autograd.grad() within a program gives: those of another call than the first were not run, and those of the
first ran on placeholders. And what the program itself asks of the views that it returns was lost."""
import pytest
import torch
import vitrify
from torch import nn

PROGRAMS = {
    "a weight": lambda w, h, x: torch.autograd.grad((w * x).exp().sum(), w)[0] * 2, "with a graph": lambda w, h, x: torch.autograd.grad((w * x).exp().sum(), w, create_graph=True)[0] * 2,
    "a penalty": lambda w, h, x: (w * x).sum() + torch.autograd.grad((w * x).exp().sum(), w, create_graph=True)[0].square().sum(), "a value": lambda w, h, x: torch.autograd.grad((h * x).exp().sum(), h)[0] * 2,
}
CHANGES = {
    "hook": lambda t, log: t.register_hook(lambda g: log.append("hook") or g * 3), "retain": lambda t, log: t.retain_grad(), "after": lambda t, log: t.is_leaf and t.register_post_accumulate_grad_hook(lambda p: log.append("after")),
    "node": lambda t, log: torch.autograd.graph.get_gradient_edge(t).node.register_prehook(lambda g: log.append("node")),
}


@pytest.mark.eager("see gradients that it takes itself", "which follows from another", "which is not a leaf", "of a tensor that is not a leaf", some=True)
@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name, given, change, when):
    told = []
    for compiles in (False, True):
        w, log = nn.Parameter(torch.full((3,), 0.5)), []
        h = w * 2
        seen = h if name == "a value" else w
        run = (lambda x, t: PROGRAMS[name](t, t, x)) if given else lambda x, t: PROGRAMS[name](w, h, x)  # noqa: B023
        f = vitrify.compile(lambda x, t=None: run(x, t)) if compiles else run  # noqa: B023
        for n in range(4):
            if n == when:
                CHANGES[change](seen, log)
            out = f(torch.full((3,), 1.0 + n), seen if given else None)
            told.append(([] if out is None else out.tolist(), list(log), None if seen.is_leaf or seen.grad is None else seen.grad.tolist()))
    assert [t[1] for t in told[4:]] == [t[1] for t in told[:4]]
    torch.testing.assert_close([torch.tensor(t[0]) for t in told[4:]], [torch.tensor(t[0]) for t in told[:4]])
    assert [t[2] is None for t in told[4:]] == [t[2] is None for t in told[:4]]


@pytest.mark.eager("registers a gradient hook, or retains the gradient", "it registers a hook", some=True)
@pytest.mark.parametrize("what", ["retain", "hook"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("view", [lambda t: t.expand(2, 3), lambda t: t[1:], lambda t: (t * 2)[1:], lambda t: (lambda y: (y, y[1:])[1])(t * 2)], ids=["expand", "slice", "of a value", "of a value, part"])
def test_views_that_are_returned(view, mode, what):
    told = []
    for compiles in (False, True):
        w, log = nn.Parameter(torch.ones(3)), []

        def f():
            v = view(w)  # noqa: B023
            with mode():
                v.retain_grad() if what == "retain" else v.register_hook(lambda g: log.append("hook"))  # noqa: B023
            return v
        f = vitrify.compile(f) if compiles else f
        for _ in range(2):
            v = f()
            retains = v.retains_grad
            v.sum().backward()
            told.append([retains, v.grad is None, w.grad.tolist(), len(log)])
    assert told[2:] == told[:2]


@pytest.mark.no_kernels("eager raises")
def test_gradients_of_a_view_in_inference_mode():
    w = nn.Parameter(torch.ones(3))

    def f():
        v = w.reshape(-1, 1)
        return torch.autograd.grad(v.sin().sum(), v)
    for g in (f, vitrify.compile(f)):
        with torch.inference_mode(), pytest.raises(RuntimeError, match="does not require grad"):
            g()


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.eager("has been given another size since", "resizes its out argument", "it makes gradients that are there", some=True)
def test_a_gradient_of_another_size():
    """The gradient of before could not be put back."""
    told = []
    for compiles in (False, True):
        h, part = torch.ones(3, 3), torch.ones(3, 3)[1:]

        def f():
            h.grad = h.detach()  # noqa: B023
            return torch.add(part, 1, out=h)  # noqa: B023
        f = vitrify.compile(f) if compiles else f
        for _ in range(3):
            told.append((f().tolist(), h.shape, h.grad.shape))
    assert told[3:] == told[:3]


@pytest.mark.eager("retains the gradient of a tensor that is not a leaf")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_backward_is_asked_for_retains_its_gradient(checkpointed):
    """Its graph is freed: a backward that comes to it later has set its .grad before that is known."""
    told = []
    for compiles in (False, True):
        w, u = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)

        def f():
            v = torch.utils.checkpoint.checkpoint(lambda a: a * u.sin(), w * 1, use_reentrant=False) if checkpointed else w * u.sin()  # noqa: B023
            (v * w).sum().backward(inputs=[v])  # noqa: B023
            g, v.grad = v.grad.clone(), None
            return v, g
        f = vitrify.compile(f) if compiles else f
        for _ in range(3):
            v, g = f()
            with pytest.raises(RuntimeError, match="a second time"):
                (v.sum() + 0).backward()
            told.append((v.retains_grad, v.grad.tolist(), g.tolist()))
    assert told[3:] == told[:3]
