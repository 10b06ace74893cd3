"""A program compiled beside eager in grad mode, forward and backward: everything that eager promises of both."""
import contextlib
import gc
import re
import warnings

import beside
import compare
import torch
import vitrify


class Stop(torch.autograd.Function):
    """Gives no gradient: what is behind is come to without one."""
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return None


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return 2 * x * g


class OnlyWithout(torch.autograd.Function):
    """What it has saved it reads where no gradient comes."""
    @staticmethod
    def forward(ctx, y):
        e = y.exp()
        ctx.save_for_backward(e)
        ctx.set_materialize_grads(False)
        return e * 2

    @staticmethod
    def backward(ctx, g):
        e, = ctx.saved_tensors
        return e if g is None else g * 3


def leaf(*size, seed=1, dtype=torch.float32, grad=True, low=0.5):
    """Positive and away from zero: for logarithms too."""
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(size, generator=g, dtype=torch.float64) + low).to(dtype).requires_grad_(grad)


def leaves(*sizes, **more):
    return lambda: [leaf(*s, seed=i + 1, **more) for i, s in enumerate(sizes)]


def weights(out):
    """What the results are weighed with: no two elements alike, so that a transposed or swapped gradient shows."""
    return [torch.randn(t.shape, generator=torch.Generator().manual_seed(40 + i), dtype=torch.float64).to(t.dtype) for i, t in enumerate(out)]


def differentiable(out):
    return [t for _, t in compare.tensors_of(out) if t.requires_grad]


def backward(out, args):
    """Through every result that has a gradient."""
    heads = differentiable(out)
    if heads:
        torch.autograd.backward(heads, weights(heads))


def only(*indices):
    """Through some of the results."""
    def run(out, args):
        heads = [compare.tensors_of(out)[i][1] for i in indices]
        torch.autograd.backward(heads, weights(heads))
    return run


class Run:
    """One call and what follows it: result, exceptions, gradients, versions, random state, launches of each half."""

    def __init__(self, fn, given, then=backward, before=None, extra=()):
        torch.manual_seed(7)
        self.given, self.extra = given, extra
        self.args = before(*given) if before else given
        tensors = [t for _, t in compare.tensors_of(self.args)]
        versions = [t._version for t in tensors]
        self.out, self.error, self.told, self.later = None, None, None, None
        self.forward, self.backward = {}, {}
        try:
            self.out, self.forward = launched(lambda: fn(*self.args))
        except Exception as e:
            self.error = e
        self.bumps = [t._version - v for t, v in zip(tensors, versions)]
        self.state = torch.get_rng_state()
        if self.error is None:
            try:
                self.told, self.backward = launched(lambda: then(self.out, self.args))
            except Exception as e:
                self.later = e
        self.later_state = torch.get_rng_state()

    @property
    def grads(self):
        return [t.grad for _, t in [*compare.tensors_of(self.given), *compare.tensors_of(self.extra)] if t.is_leaf]


def launched(fn):
    before = dict(vitrify.counters)
    result = fn()
    return result, {k: v - before[k] for k, v in vitrify.counters.items()}


def line(error):
    return type(error), compare.first_line(error)


def same(ours, eager, values=torch.testing.assert_close):
    assert line(ours.error) == line(eager.error)
    assert line(ours.later) == line(eager.later)
    assert ours.bumps == eager.bumps
    assert torch.equal(ours.state, eager.state) and torch.equal(ours.later_state, eager.later_state)
    left, right = compare.flat([ours.out, ours.told]), compare.flat([eager.out, eager.told])
    assert [p for p, _ in left] == [p for p, _ in right] and compare.containers(ours.out) == compare.containers(eager.out)
    for (where, a), (_, b) in zip(left + compare.flat(ours.args, "in"), right + compare.flat(eager.args, "in")):
        if isinstance(b, torch.Tensor):
            compare.check_meta(where, a, b)
            values(a.detach(), b.detach(), equal_nan=True)
            assert (a.grad_fn is None) == (b.grad_fn is None) and a.is_leaf == b.is_leaf, where
        else:
            assert type(a) is type(b) and (a is b or a == b), where
    assert compare.alias_pattern(ours.out, ours.args) == compare.alias_pattern(eager.out, eager.args)
    assert beside.bases(ours.out, ours.args) == beside.bases(eager.out, eager.args)
    same_grads(ours.grads, eager.grads, values)


def same_grads(ours, eager, values=torch.testing.assert_close):
    """Values, None where eager has None, dtype, strides; no two share memory unless eager's do."""
    assert [g is None for g in ours] == [g is None for g in eager]
    for i, (a, b) in enumerate(zip(ours, eager)):
        if b is not None:
            compare.check_meta(f"grad[{i}]", a, b)
            values(a, b, equal_nan=True)
    shared = lambda grads: [[a is not None and b is not None and compare.storage(a) == compare.storage(b) for a in grads] for b in grads]  # noqa: E731
    assert all(b or not a for ours_row, eager_row in zip(shared(ours), shared(eager)) for a, b in zip(ours_row, eager_row))


def check(fn, make, reason=None, *, then=backward, before=None, around=contextlib.nullcontext, native="both", calls=3, values=torch.testing.assert_close, extra=None, inner=contextlib.nullcontext):
    """`fn` compiled beside itself, `calls` times, each on fresh tensors of make().

    reason: part of the one warning; "" if there is none and eager's exception is all there is; None: compiled, without a warning.
    native: which halves must launch kernels of ours: "both", "forward", "none". before: what makes the arguments of what make() gave.
    extra: leaves that the program reads besides its arguments; their gradients are those of one call. inner: a context around each call alone."""
    beside.announce(reason, native != "none")
    compiled, start = vitrify.compile(fn), dict(vitrify.counters)
    extra, compiled_calls = extra or (), 0

    def run(f, number):
        for t in extra:
            t.grad = None
        with inner():
            r = Run(f, compare.halved(make(), number), then, before, extra)
        kept = [g.clone() if g is not None else None for g in r.grads]  # with the strides they have
        return r, kept
    with warnings.catch_warnings(record=True) as log, around():
        warnings.simplefilter("always")
        earlier = []
        for number in range(calls):
            ours, kept = run(compiled, number)
            if extra:
                eager, theirs = run(fn, number)
                same_grads(kept, theirs, values)
                ours.extra = eager.extra = ()
            else:
                eager, _ = run(fn, number)
            same(ours, eager, values)
            earlier.append([compare.held([r.out, r.told, r.grads]) for r in (ours, eager)])
            compiled_calls += ours.forward.get("compiled_calls", 0)
            if reason is None and ours.error is None and native != "none":
                assert ours.forward["kernels_launched"] > 0, "no kernel ran in the forward"
                if native == "both" and ours.later is None:
                    assert ours.backward["kernels_launched"] > 0, "no kernel ran in the backward"
    assert all(compare.changed(mine) == compare.changed(theirs) for mine, theirs in earlier)  # a later call writes over no result
    messages = [str(w.message) for w in log if issubclass(w.category, vitrify.VitrifyWarning)]
    did = {k: v - start[k] for k, v in vitrify.counters.items()}
    if reason is None:
        assert messages == [], messages
        assert compiled_calls == calls and did["eager_calls"] == 0 and did["fallbacks"] == 0, did
    else:
        assert did["compiled_calls"] == 0 and len(messages) == bool(reason) and all(reason in m for m in messages), messages


def exact(a, b, **_):
    assert compare.bits_equal(a, b)


@contextlib.contextmanager
def collector_off():
    """What goes in it goes by reference counts."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collected(ref):
    gc.collect()
    return ref() is None
