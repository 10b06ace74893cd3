"""Writes of custom ops: where the op itself counts none, eager counts those that its kernel makes, however many that are in a call."""
import pytest
import torch
import vitrify
from torch.utils.checkpoint import checkpoint

lib = torch.library.Library("versions_of_custom_ops", "DEF")
lib.define("times(Tensor(a!) x, int n) -> ()")
lib.define("by_content(Tensor(a!) x, Tensor n) -> Tensor")
lib.define("each(Tensor(a!)[] x) -> ()")
lib.define("below(Tensor(a!) x) -> ()")


def times(x, n):
    for _ in range(n):
        x.add_(1)


def by_content(x, n):
    times(x, int(n))
    return x.sum()


lib.impl("times", times, "CPU")
lib.impl("by_content", by_content, "CPU")
lib.impl("each", lambda x: [times(t, i) for i, t in enumerate(x)] and None, "CPU")
lib.impl("below", lambda x: x.numpy().fill(3) and None, "CPU")
for name, meta in {"times": lambda x, n: None, "by_content": lambda x, n: x.new_empty(()), "each": lambda x: None, "below": lambda x: None}.items():
    lib.impl(name, meta, "Meta")


@torch.library.custom_op("versions_of_custom_ops::own", mutates_args=["x"])
def own(x: torch.Tensor) -> None:
    times(x, 3)


ops = torch.ops.versions_of_custom_ops
FNS = {
    "one": lambda x, y: (ops.times(x, 1), x + 1)[1],
    "several": lambda x, y: (ops.times(x, 3), x + 1)[1],
    "none": lambda x, y: (ops.times(x, 0), x + 1)[1],
    "twice": lambda x, y: (ops.times(x, 2), ops.times(x, 1), x + y)[2],
    "beside others": lambda x, y: (x.mul_(2), ops.times(x, 2), x.sin_())[2] + 1,
    "through a view": lambda x, y: (ops.times(x[1:], 2), x + 1)[1],
    "through .data": lambda x, y: (ops.times(x.data, 2), x + 1)[1],
    "by content": lambda x, y: ops.by_content(x, y.sum()) + x,
    "a list": lambda x, y: (ops.each([x, y]), x + y)[1],
    "no op": lambda x, y: (ops.below(x), x + 1)[1],
    "counted by the op": lambda x, y: (own(x), x + 1)[1],
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("fn", FNS)
def test_each_call(fn, mode):
    compiled, results = vitrify.compile(FNS[fn], fullgraph=True), []
    for f in (FNS[fn], compiled):
        counts = []
        for n in (2, 2, 4):
            x, y = torch.ones(3), torch.full((3,), float(n))
            with mode():
                out = f(x, y)
            counts.append((out, x, y, torch.tensor([x._version, y._version])))
        results.append(counts)
    torch.testing.assert_close(*results)


def test_what_a_gradient_reads_was_written():
    """x has been saved, and was written to since: a backward raises, in eager by the versions that the kernel's writes have counted."""
    def fn(x, w):
        out = x * w
        ops.times(x, 2)
        return out, x + 1
    results = []
    for f in (vitrify.compile(fn), fn):
        x, w = torch.ones(3), torch.ones(3, requires_grad=True)
        out, rest = f(x, w)
        with pytest.raises(RuntimeError) as e:
            out.sum().backward()
        results.append((str(e.value).partition("\n")[0], rest.tolist(), x._version))
    assert results[0] == results[1]


@pytest.mark.parametrize("op", [own, lambda x: ops.times(x, 2), ops.below], ids=["own", "times", "below"])
def test_a_gradient_reads_what_the_program_made(op):
    """Nobody else has it: it is what it was, whatever the version with which it came from the op."""
    def fn(x):
        made = x.detach() * 2
        op(made)
        return (x * made).sin()
    results = []
    for f in (vitrify.compile(fn, fullgraph=True), fn):
        x = torch.linspace(0.5, 2, 4).requires_grad_()
        f(x).sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results)


def test_written_between_forward_and_backward():
    write = vitrify.compile(lambda x: (ops.times(x, 2), x + 1)[1], fullgraph=True)
    f = vitrify.compile(lambda x, w: x * w, fullgraph=True)
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    out = f(x, w)
    with torch.no_grad():
        write(x)
    with pytest.raises(RuntimeError, match="is at version 2; expected version 0"):
        out.sum().backward()


def test_what_is_written_is_of_its_mode():
    """What a call gives in inference mode is an inference tensor, written by a custom op or not."""
    def fn(x):
        y = x * 2
        torch.ops.versions_of_custom_ops.times(y, 2)
        return y
    with torch.inference_mode():
        got, expected = vitrify.compile(fn, fullgraph=True)(torch.ones(3)), fn(torch.ones(3))
    torch.testing.assert_close(got, expected)
    assert got.is_inference() and expected.is_inference()


class Holder(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f
        self.register_buffer("b", torch.zeros(3))

    def forward(self, x):
        return self.f(self.b, x)


@torch.library.custom_op("versions_of_custom_ops::both", mutates_args=["x", "y"])
def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1), y.add_(2)
    return x + y


both.register_fake(lambda x, y: torch.empty_like(x))
FOUND = {
    "counted by the op": lambda b, x: (own(b), x.sin())[1],
    "read before": lambda b, x: (lambda y: (own(b), y.sin())[1])(b + x),
    "read behind": lambda b, x: (own(b), x * b.detach().clone())[1],
    "twice": lambda b, x: (own(b), own(b), x.sin())[2],
    "through a view": lambda b, x: (own(b[1:]), x.sin())[1],
    "with a new one": lambda b, x: both(b, torch.zeros(3)).detach() + x.sin(),
    "counted by what it calls": lambda b, x: (ops.times(b, 2), x.sin())[1],
    "beside others": lambda b, x: (own(b), b.mul_(2), x.sin())[2],
    "in a checkpoint": lambda b, x: checkpoint(lambda x: (own(b), x.sin())[1], x, use_reentrant=False),
}


@pytest.mark.eager("once more when a checkpoint is computed again", some=True)
@pytest.mark.parametrize("how", ["trained", "no_grad", "in inference"])
@pytest.mark.parametrize("place", ["closure", "buffer"])
@pytest.mark.parametrize("fn", FOUND)
def test_what_the_program_finds(fn, place, how):
    def told(compile):
        b = torch.zeros(3)
        net = Holder(FOUND[fn])
        f, of = (compile(lambda x: FOUND[fn](b, x)), b) if place == "closure" else (compile(net), net.b)
        counts = []
        for n in range(3):
            x = torch.ones(3, requires_grad=True)
            with torch.set_grad_enabled(how == "trained"), torch.inference_mode(how == "in inference"):
                y = f(x)
            if how == "trained":
                y.sum().backward()
            counts.append((of._version, of.tolist(), y.tolist()))
        w = torch.ones(3, requires_grad=True)
        late = (w * of).sum()
        with torch.no_grad():
            f(torch.ones(3))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            late.backward()
        return counts
    assert told(vitrify.compile) == told(lambda f: f)


lib.define("raises(Tensor(a!) x, int n) -> Tensor")
lib.impl("raises", lambda x, n: (times(x, n), x.sum().item() > 100 and torch.cholesky_inverse(x), x * 2)[2], "CPU")
lib.impl("raises", lambda x, n: torch.empty_like(x), "Meta")


@torch.library.custom_op("versions_of_custom_ops::own_raises", mutates_args=["x"])
def own_raises(x: torch.Tensor) -> torch.Tensor:
    times(x, 2)
    if x.sum() > 100:
        raise ValueError("too much")
    return x * 2


own_raises.register_fake(torch.empty_like)


@pytest.mark.parametrize("fn", [lambda x: ops.raises(x, 3) + 1, lambda x: own_raises(x) + 1], ids=["counted by the kernel", "counted by the op"])
def test_one_that_raises_behind_its_write(fn):
    compiled, told = vitrify.compile(fn), []
    for f in (fn, compiled):
        told.append([])
        for value in (0., 1000., 0.):
            x, raised = torch.full((3,), value), None
            before = x._version
            try:
                with torch.no_grad():
                    f(x)
            except (RuntimeError, ValueError) as e:
                raised = type(e)
            told[-1].append((raised, x.tolist(), x._version - before))
    assert told[0] == told[1] and told[0][1][0]
