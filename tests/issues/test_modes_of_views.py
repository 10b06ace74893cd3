"""Views among results are made as eager made them: of the same memory, in the mode in which the program made each, and of what nobody else is given as well. Autograd takes
those of other modes for others: it has no history, counts writes by itself, or lets nobody write."""
import contextlib
import re

import pytest
import torch
import vitrify

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, g):
        return g.view(4, 4) * 3


def under(mode, view, of=lambda x: x):
    def program(x):
        y = of(x)
        with mode():
            return view(y)
    return program


def value(x):
    return x * 2


def as_told(e):
    return re.sub(r"\[torch.FloatTensor \[.*?\]\]|Output \d of \w+|, which is output \d+ of \w+,|version \d+; expected version \d+.*", "", str(e).split("\n")[0])


def same(a, b):
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(p, q) for p, q in zip(a, b))
    return torch.allclose(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b if a is None or b is None else type(a) is type(b) and a == b


def told(fn, use, mode, needs=True):
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=needs)
    try:
        with mode():
            out = fn(x)
        out = out if isinstance(out, (tuple, list)) else [out]
        before = [(t.requires_grad, t.is_leaf, t.is_inference(), t._is_view(), t.stride()) for t in out]
        log = [use(x, out)]
    except RuntimeError as e:
        return [as_told(e)]
    return before, log, [t.detach() for t in out], x.grad, [t._version for t in out if not t.is_inference()]


def backward(x, out):
    if any(t.requires_grad for t in out):
        sum((t * t).sum() for t in out if t.requires_grad).backward()


def write(x, out):
    out[-1].mul_(2.)
    backward(x, out)


def write_unseen(x, out):
    out[-1].data.mul_(2.)
    backward(x, out)


def write_without_gradients(x, out):
    with torch.no_grad():
        out[-1].mul_(2.)
    return out[-1].grad_fn is None


def write_what_needs_gradients(x, out):
    out[0].add_(torch.ones((), requires_grad=True))
    backward(x, out)


def detach_(x, out):
    out[0].detach_()


def turn(x, out):
    out[0].unsqueeze_(0)
    backward(x, out)


def gradient_of_one(x, out):
    log = []
    out[0].register_hook(lambda g: log.append(g if g is None else g.clone()) or (g if g is None else g * 2))
    return torch.autograd.grad(out[-1].sum(), [out[0], x], allow_unused=True), log


PROGRAMS = {
    "chunks of a value, with gradients": under(torch.enable_grad, lambda y: y.chunk(2), value), "chunks of an argument, with gradients": under(torch.enable_grad, lambda y: y.unbind(1)),
    "a chunk, and a view of it without": lambda x: torch.no_grad()(lambda c: c.t())((x * 2).chunk(2)[1]), "of an argument in inference mode": under(torch.inference_mode, lambda y: y[1:]),
    "of a value in inference mode": under(torch.inference_mode, lambda y: y[1:], value), "of a value, without gradients": under(torch.no_grad, lambda y: y.t(), value),
    "a Function's": lambda x: Flat.apply(x * 2), "a Function's, and what follows": lambda x: (lambda v: (v, (v * 3).sum()))(Flat.apply(x * 2)), "a view of a Function's": lambda x: Flat.apply(x * 2)[2:],
    ".data of what is saved": lambda x: (lambda z: (z.sum(), z.data))(x.exp()), "a view of .data of what is saved": lambda x: (lambda z: ((z * z).sum(), z.data[1:]))(torch.softmax(x, -1)),
    "a detached view of what is saved": lambda x: (lambda z: (z.sum(), z.detach()[1:]))(x.exp()), "followed": lambda x: (lambda v: (v, (v * 3).sum()))((x * 2)[1:]),
    "of a linear layer's": lambda x: (lambda v: (v, v.exp()))(torch.nn.functional.linear(x, x).view(2, 8)),
}
# Of any sizes users get the value itself, from which others follow: it is no view.
NO_VIEWS_OF_ANY_SIZE = ("followed", "of a linear layer's")
USES = [backward, write, write_unseen, write_without_gradients, write_what_needs_gradients, detach_, turn, gradient_of_one]
MODES = {"": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}

def in_turn(*steps):
    """Each step under its own mode, from x on; the last gives what is returned."""
    def program(x):
        for mode, step in steps:
            with mode():
                x = step(x)
        return x
    return program


plain, no_grad, inference = contextlib.nullcontext, torch.no_grad, torch.inference_mode
# What counts writes by itself, in whatever mode it is made, is one tensor to all that is made of it.
PROGRAMS_APART = {
    "two views of what is detached": in_turn((plain, lambda x: (x * 2).detach()), (torch.enable_grad, lambda d: (d[1:], d.view(-1)))),
    "two views of one made without gradients": in_turn((no_grad, lambda x: (x * 2).detach()[1:]), (plain, lambda v: (v[:, :2], v.t()))),
    "two views of .data": in_turn((no_grad, lambda x: x.exp()), (plain, lambda y: y.data), (plain, lambda d: (d.view(-1), d[2:]))),
    "two views of an argument's .data": in_turn((plain, lambda x: x.data), (plain, lambda d: (d.view(-1), d[2:]))),
    "bits, in inference mode": in_turn((plain, lambda x: x.exp()), (inference, lambda y: y.view(torch.int32))),
    "bits of a value made in inference mode": in_turn((inference, lambda x: x.exp()), (no_grad, lambda y: y.view(torch.int32))),
    "pairs of a value made in inference mode": in_turn((inference, lambda x: x.exp()), (no_grad, lambda y: torch.view_as_complex(y.view(2, 4, 2)))),
    ".data of a value made in inference mode": in_turn((inference, lambda x: x.exp()), (no_grad, lambda y: y.data)),
    ".data of one, twice": in_turn((inference, lambda x: x * 2), (torch.enable_grad, lambda y: y.data), (plain, lambda d: (d, d))),
    ".data, in inference mode": in_turn((no_grad, lambda x: x * 2), (inference, lambda y: y.data)),
    "a Function's, of a value made without gradients": in_turn((no_grad, lambda x: x.exp()), (plain, Flat.apply)),
    "a Function's, without gradients, and a view of it": in_turn((plain, lambda x: x.exp().detach()), (no_grad, Flat.apply), (plain, lambda v: (v, v[2:]))),
    "a Function's, of an argument": in_turn((no_grad, Flat.apply), (plain, lambda v: (v, (v * 3).sum()))),
}


def base_of(x, out):
    bases = [t._base for t in out]
    return [None if b is None else tuple(b.shape) for b in bases], [bases[0] is b for b in bases]


def versions(x, out):
    with torch.no_grad():
        out[-1].add_(1)
    return [t._version for t in out]


@pytest.mark.compiled("some programs make views and compute nothing")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS_APART)
def test_what_counts_by_itself(name, mode):
    compiled = vitrify.compile(PROGRAMS_APART[name])
    for use in [*USES[:6], base_of, versions]:
        for needs in (True, False):
            eager, ours = told(PROGRAMS_APART[name], use, MODES[mode], needs), told(compiled, use, MODES[mode], needs)
            assert same(ours, eager), (use.__name__, needs, ours, eager)
    assert vitrify.counters["compiled_calls"] > 0 and vitrify.counters["eager_calls"] == 0


@pytest.mark.sweep(3)
@pytest.mark.compiled("some programs make views and compute nothing")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name, dynamic", [(n, d) for n in PROGRAMS for d in (False, True) if not (d and n in NO_VIEWS_OF_ANY_SIZE)])
def test_each_use(name, dynamic, mode):
    compiled = vitrify.compile(PROGRAMS[name], dynamic=dynamic)
    for use in USES:
        for needs in (True, False):
            eager, ours = told(PROGRAMS[name], use, MODES[mode], needs), told(compiled, use, MODES[mode], needs)
            assert same(ours, eager), (use.__name__, needs, ours, eager)
    assert vitrify.counters["compiled_calls"] > 0
    if mode != "inference":
        assert vitrify.counters["eager_calls"] == 0
