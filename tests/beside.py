"""A program compiled beside eager, three calls: it either launches kernels or says once why it does not.

Compared: values, metadata, which tensors are which object or share memory, bases of views, exact version counters of the inputs, the random state, exceptions."""
import contextlib
import warnings

import compare
import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch import nn
from vitrify import _C


def plan_of(compiled):
    state = _C.twin_state(compiled) if isinstance(compiled, nn.Module) else _C.installed_state(compiled)
    return _C.state_entries(state)[0][0].describe()


def calls_of(compiled):
    """Names of the ops that the plans still call."""
    return {line.split()[1].split("(")[0] for line in plan_of(compiled).splitlines() if line.startswith("extern ")}


def run(fn, args):
    torch.manual_seed(7)
    tensors = [t for _, t in compare.tensors_of(args)]
    version = lambda t: None if t.is_inference() else t._version  # noqa: E731
    before = [version(t) for t in tensors]
    out, error = None, None
    try:
        out = fn(*args)
    except Exception as e:
        error = e
    return out, error, [b is not None and version(t) - b for t, b in zip(tensors, before)], torch.get_rng_state()


def bases(out, args):
    known = [t for _, t in compare.tensors_of(args)] + [t for _, t in compare.tensors_of(out)]
    return [(t.is_inference(), next((i for i, k in enumerate(known) if k is t._base), None)) for _, t in compare.tensors_of(out)]


def same_call(ours, eager, ours_given, eager_given):
    (out, error, bumps, state), (eager_out, eager_error, eager_bumps, eager_state) = ours, eager
    assert type(error) is type(eager_error) and str(error).partition("\n")[0] == str(eager_error).partition("\n")[0]
    assert bumps == eager_bumps and torch.equal(state, eager_state)
    left, right = compare.flat(out), compare.flat(eager_out)
    assert [p for p, _ in left] == [p for p, _ in right] and compare.containers(out) == compare.containers(eager_out)
    for (where, a), (_, b) in zip(left + compare.flat(ours_given, "in"), right + compare.flat(eager_given, "in")):
        if isinstance(b, torch.Tensor):
            compare.check_meta(where, a, b)
            torch.testing.assert_close(a, b, equal_nan=True)
        else:
            assert type(a) is type(b) and (a is b or a == b), where
    assert compare.alias_pattern(out, ours_given) == compare.alias_pattern(eager_out, eager_given)
    assert bases(out, ours_given) == bases(eager_out, eager_given)


def announce(reason, launches=True):
    if reason:
        expects.eager(reason)
    elif reason == "":
        expects.no_kernels("the program raises")
    elif not launches:
        expects.compiled("the program has nothing to compute, or ATen computes all of it")


def check(fn, make, reason=None, launches=True, around=contextlib.nullcontext, grad=False):
    """`reason`: part of the only warning; "" if eager's exception is all there is to see; None: no warning, and it ran compiled."""
    announce(reason, launches)
    compiled, before = vitrify.compile(fn), dict(vitrify.counters)
    with warnings.catch_warnings(record=True) as log, torch.set_grad_enabled(grad), around():
        warnings.simplefilter("always")
        earlier = []
        for number in range(3):
            a, b = (compare.halved(made, number) for made in (make(), make()))
            ours, eager = run(compiled, a), run(fn, b)
            same_call(ours, eager, a, b)
            earlier.append((compare.held(ours[0]), compare.held(eager[0])))
        assert all(compare.changed(mine) == compare.changed(theirs) for mine, theirs in earlier)  # a later call writes over no result
    messages = [str(w.message) for w in log if issubclass(w.category, vitrify.VitrifyWarning)]
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    if reason is None:
        assert messages == [] and did["compiled_calls"] == 3 and did["eager_calls"] == 0
        assert (did["kernels_launched"] > 0) == launches
    else:
        assert did["compiled_calls"] == 0 and len(messages) == bool(reason) and all(reason in m for m in messages), messages


def same_outcome(run, fn):
    """What `run` gives with the compiled function as with the eager one: tensors, or an error's text."""
    expected, given = run(fn), run(vitrify.compile(fn, fullgraph=True))
    if isinstance(expected, str):
        assert given == expected
    else:
        torch.testing.assert_close(given, expected)


def steps(*sizes):
    return lambda: [torch.arange(1.0, 1 + torch.Size(s).numel()).reshape(s).clone() for s in sizes]


def program(text, **names):
    """def f(x, y): one line of text."""
    scope = {"__name__": __name__, "torch": torch, "F": F, "nn": nn, **names}
    exec(f"def f(x, y=None):\n    {text}\n", scope)
    return scope["f"]


def cases(table):
    return pytest.mark.parametrize("text, more", table, ids=[t for t, _ in table])


MODES = pytest.mark.parametrize("around, grad", [(contextlib.nullcontext, False), (contextlib.nullcontext, True), (torch.inference_mode, False)], ids=["no_grad", "grad", "inference"])
