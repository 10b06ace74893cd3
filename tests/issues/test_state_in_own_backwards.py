"""What a Function's backward reads and does beyond its gradients: .grad set or read there, gradients that it takes itself by what it was given, sizes that content decides. It was as at the capture, and a placeholder came into .grad."""
import pytest
import torch
import vitrify
from torch.autograd import Function, grad
from torch.utils.checkpoint import checkpoint


def function(forward, backward):
    return type("Fn", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}).apply


def doubled(ctx, x):
    return x * 2


def saved(ctx, x):
    ctx.save_for_backward(x)
    return x * 2


def told(f, script):
    seen = []
    for k in range(3):
        x = torch.ones(2, requires_grad=True)
        seen.append(script(f, x, k))
    return seen


@pytest.mark.eager("Fn changes an attribute (grad) in its backward")
@pytest.mark.parametrize("given", ["number", "none", "added"])
def test_grad_set(given):
    def both(compile):
        w = torch.ones(2, requires_grad=True)

        def backward(ctx, g):
            w.grad = None if given == "none" else g * 2 if given == "number" else g * 2 + (0 if w.grad is None else w.grad)
            return g
        apply = function(doubled, backward)

        def script(f, x, k):
            if given == "none":
                w.grad = torch.zeros(2)
            f(x).backward(torch.full((2,), 1.0 + k))
            return None if w.grad is None else w.grad.tolist(), x.grad.tolist()
        return told(compile(lambda x: apply(x)), script)
    assert both(vitrify.compile) == both(lambda f: f)


@pytest.mark.eager("the .grad of a tensor in a backward of its own")
def test_grad_read():
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g if x.grad is None else g * x.grad
    apply = function(saved, backward)

    def script(f, x, k):
        y = f(x)
        x.grad = torch.full((2,), 3.0 + k)
        return grad(y.sum(), x)[0].tolist()
    assert told(vitrify.compile(lambda x: apply(x)), script) == told(lambda x: apply(x), script)


@pytest.mark.eager("takes gradients in a backward of its own")
@pytest.mark.parametrize("hook", ["changes", "logs", "none"])
def test_gradients_taken(hook):
    log = []

    def backward(ctx, g):
        x, = ctx.saved_tensors
        with torch.enable_grad():
            r, = grad(x.pow(3).sum(), x)
        return r * g
    apply = function(saved, backward)

    def script(f, x, k):
        y = f(x)
        if hook != "none":
            x.register_hook(lambda g: g * 2 if hook == "changes" else log.append(1))
        y.sum().backward()
        return x.grad.tolist(), len(log)
    eager = told(lambda x: apply(x), script)
    log.clear()
    assert told(vitrify.compile(lambda x: apply(x)), script) == eager


def test_gradients_of_what_it_has_made():
    """By copies of its own, as a checkpoint does it."""
    def backward(ctx, g):
        x, = ctx.saved_tensors
        with torch.enable_grad():
            own = x.detach().requires_grad_()
            r, = grad(own.pow(3).sum(), own)
        return r * g
    apply = function(saved, backward)

    def script(f, x, k):
        f(x).mul(k + 1).sum().backward()
        return x.grad.tolist()
    assert told(vitrify.compile(lambda x: apply(x) * 3, fullgraph=True), script) == told(lambda x: apply(x) * 3, script)


SIZES = {"sum": lambda g: (g * (g != 0).nonzero().shape[0]).sum().expand(2), "softmax": lambda g: (g * g[g > 0].numel()).softmax(0), "cumsum": lambda g: (g * g[g > 0].shape[0]).cumsum(0), "pointwise": lambda g: g * (g != 0).nonzero().shape[0]}


@pytest.mark.parametrize("results", [1, 2])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_content(name, results):
    apply = function(doubled, lambda ctx, g: SIZES[name](g))

    def program(x):
        return (x * 3, apply(x))[-results:]

    def script(f, x, k):
        f(x)[-1].backward(torch.tensor([1.0, float(k % 2)]))
        return [round(v, 5) for v in x.grad.tolist()]
    assert told(vitrify.compile(program, fullgraph=True), script) == told(program, script)


@pytest.mark.eager("takes gradients in a backward of its own")
def test_gradients_taken_by_an_edge():
    def backward(ctx, g):
        x, = ctx.saved_tensors
        with torch.enable_grad():
            r, = grad(x.pow(3).sum(), [torch.autograd.graph.get_gradient_edge(x)])
        return r * g
    apply = function(saved, backward)

    def script(f, x, k):
        y = f(x)
        x.register_hook(lambda g: g * 2)
        y.sum().backward()
        return x.grad.tolist()
    assert told(vitrify.compile(lambda x: apply(x)), script) == told(lambda x: apply(x), script)


@pytest.mark.eager("Fn may write in its backward")
def test_a_write_for_other_gradients_only():
    """No derivative that is captured later could make it."""
    b = torch.zeros(2)

    def backward(ctx, g):
        if not g.is_contiguous():
            b.add_(1)
        return g * 2
    apply = function(doubled, backward)
    f = vitrify.compile(lambda x: (apply(x), b * 1)[0])
    x = torch.ones(2, 2, requires_grad=True)
    f(x).backward(torch.ones(2, 2))
    f(x).backward(torch.ones(2, 2, 2)[..., 0])
    assert b.tolist() == [1, 1]


@pytest.mark.eager("gradients are computed op by op")
def test_a_write_of_a_checkpoint_when_it_is_called_again():
    """What a derivative that is captured later would have to write is an error, and nothing is lost silently."""
    b, on = torch.zeros(2), []

    def part(x):
        if on:
            b.add_(1)
        return x.sin()
    f = vitrify.compile(lambda x: (checkpoint(part, x, use_reentrant=False), b * 1)[0], fullgraph=True)
    x = torch.ones(2, 2, requires_grad=True)
    f(x).backward(torch.ones(2, 2))
    y = f(x)
    on.append(1)
    with pytest.raises(RuntimeError, match="writes to input 'b' in a backward"):
        y.backward(torch.ones(2, 2, 2)[..., 0])
