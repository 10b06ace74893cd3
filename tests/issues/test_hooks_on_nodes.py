"""Hooks on autograd's nodes rather than on tensors: those of the node that adds to a leaf's .grad run where a program's own backward() comes to it, and a
program that registers one runs eagerly."""
import pytest
import torch
import vitrify


def accumulator(w):
    return w.view_as(w).grad_fn.next_functions[0][0]


def double(g):
    return (g[0] * 2,)


HOW = {"prehook": lambda w: accumulator(w).register_prehook(lambda g: (g[0] * 0,)), "hook": lambda w: accumulator(w).register_hook(lambda a, b: None if w.grad.mul_(0) is w.grad else ()), "tensor": lambda w: w.register_hook(lambda g: g * 0),
       "accumulated": lambda w: w.register_post_accumulate_grad_hook(lambda w: None if w.grad.mul_(0) is w.grad else 1)}


STEPS = {"left": lambda w, g: None, "taken away": lambda w, g: setattr(w, "grad", None), "put back": lambda w, g: setattr(w, "grad", g), "zero": lambda w, g: w.grad.zero_()}


@pytest.mark.eager("hooks of what it reaches see gradients", "hooks of w see gradients", "it makes gradients that are there from the first call on", some=True)
@pytest.mark.parametrize("afterwards", STEPS)
@pytest.mark.parametrize("inputs", [False, True], ids=["all", "inputs"])
@pytest.mark.parametrize("before", [False, True], ids=["registered after calls", "before"])
@pytest.mark.parametrize("how", HOW)
def test_a_step(how, before, inputs, afterwards):
    """Whatever the program does with the gradient after it."""
    def told(compile):
        w = torch.ones(3, requires_grad=True)
        node = accumulator(w)  # alive, as who registers keeps it

        def step(x):
            old = w.grad
            if afterwards == "left":
                w.grad = None
            (x * w).square().sum().backward(inputs=[w] if inputs else None)
            with torch.no_grad():
                w.sub_(w.grad, alpha=0.1)
            STEPS[afterwards](w, old)
            return w.detach() * 1
        f, seen = compile(step), []
        handle = HOW[how](w) if before else None
        for k in range(7):
            if k == 2 and not before:
                handle = HOW[how](w)
            if k == 5:
                handle.remove()
            seen.append(f(torch.ones(3)))
        del node
        return seen
    torch.testing.assert_close(told(vitrify.compile), told(lambda f: f))


@pytest.mark.eager("hooks of w see gradients")
def test_what_hooks_keep():
    """Python state in a hook is that of each backward."""
    def told(compile):
        w, seen = torch.ones(3, requires_grad=True), []
        node, count = accumulator(w), []

        def hook(g):
            count.append(1)
            return (g[0] * len(count),)
        node.register_prehook(hook)

        def program(x):
            (x * w).sum().backward()
            return w.grad * 1
        f = compile(program)
        for _ in range(4):
            w.grad = None
            seen.append(f(torch.ones(3)))
        return seen, len(count)
    torch.testing.assert_close(told(vitrify.compile), told(lambda f: f))


@pytest.mark.eager("registers a gradient hook", some=True)
@pytest.mark.parametrize("kind", ["leaf", "leaf's hook", "grad_fn", "found", "once", "compiled"])
def test_registered_by_the_program(kind):
    def told(compile):
        w, done = torch.ones(3, requires_grad=True), []
        h, c = w * 2, compile(lambda w: w * 3)(w)
        node = accumulator(w)

        def program(x):
            if kind == "leaf":
                node.register_prehook(double)
            if kind == "leaf's hook":
                node.register_hook(lambda a, b: None if w.grad.mul_(2) is w.grad else ())
            if kind == "grad_fn":
                h.grad_fn.register_prehook(double)
            if kind == "found":
                accumulator(w).register_prehook(double)
            if kind == "once" and not done:
                done.append(1)
                node.register_prehook(double)
            if kind == "compiled":
                c.grad_fn.register_prehook(double)
            return x * (h if kind == "grad_fn" else c if kind == "compiled" else w)
        f, seen = compile(program), []
        for _ in range(3):
            w.grad = None
            f(torch.ones(3)).sum().backward(retain_graph=True)
            seen.append(w.grad[0].item())
        return seen
    assert told(vitrify.compile) == told(lambda f: f)


@pytest.mark.parametrize("how", ["before", "after"])
def test_hooks_of_a_leafs_node_see_of_what_a_gradient_is_a_view(how):
    """Where nobody looks, leaves are given the memory without the views."""
    def told(compile):
        torch.manual_seed(0)
        net, seen = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double(), []
        nodes = [accumulator(p) for p in net.parameters()]

        def see(g):
            seen.append((g.shape, g.stride(), g._is_view(), g.clone()))
        for node in nodes:
            node.register_prehook(lambda given: see(given[0])) if how == "before" else node.register_hook(lambda _, given: see(given[0]))
        f = compile(net)
        for k in range(3):
            f(torch.full((5, 3), 1.0 + k, dtype=torch.float64)).sum().backward()
        return seen
    ours, eager = told(vitrify.compile), told(lambda f: f)
    assert len(ours) == len(eager) == 12 and [t[:3] for t in ours] == [t[:3] for t in eager] and all(t[2] for t in ours)
    torch.testing.assert_close([t[3] for t in ours], [t[3] for t in eager])
