"""One op of torch's own op database, compiled in grad mode, with its gradients beside eager's: values, strides, None where eager has None, errors. Of the first
order, or of the second: gradients of the gradients with respect to inputs and tangents."""
from __future__ import annotations

import contextlib

import torch
import vitrify

import opinfo
from compare import RAN_EAGERLY, Mismatch, attempt, check_leaves, conditioned_run, copied, flat, fp64_run, halved, tensors_of

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def tangents_for(heads, requires_grad):
    made = []
    for i, t in enumerate(heads):
        dtype = torch.complex128 if t.is_complex() else torch.float64
        made.append(torch.randn(t.shape, generator=torch.Generator().manual_seed(i), dtype=dtype).to(t.dtype).requires_grad_(requires_grad))
    return made


def with_gradient(fn, used=None, around=contextlib.nullcontext, order=1):
    """(results, gradients of all inputs that need them, which results have one), through every result that has one; `used`: through those that it says (a function
    of their count). around: a context for the derivative. order=2: also the gradients of those gradients, and which of the first have them."""
    def run(*sample):
        given = [t for _, t in tensors_of(sample) if t.requires_grad]
        out = fn(*sample)
        made = [[t.detach() if isinstance(t, torch.Tensor) else t for _, t in flat(out)]]
        last = [t for _, t in tensors_of(out)]
        for level in range(1, order + 1):
            needs = [t.requires_grad for t in last]
            heads = [t for t in last if t.requires_grad]
            if used and heads:
                heads = [heads[i] for i in used(len(heads))]
            grads = []
            if heads and given:
                with around():  # tangents are inputs like others
                    tangents = tangents_for(heads, level < order)
                    grads = list(torch.autograd.grad(heads, given, tangents, allow_unused=True, create_graph=level < order))
                given = given + tangents
            made += [[g if g is None else g.detach() for g in grads], needs]
            last = [g for g in grads if g is not None]
        return tuple(made)
    return run


def compare(fn, sample, has_value, reference_run, elementwise, used=None, order=1, open_strides=None):
    """Raises Mismatch; returns what the second call launched, in both halves, and what either ran eagerly. open_strides(i, ours, eager): leaf i differs in strides that torch leaves open."""
    plain = with_gradient(fn, used, order=order)
    compiled = with_gradient(vitrify.compile(fn), used, order=order)
    did, unclear = {}, 0
    for run in ("first call", "second call"):
        sample = halved(copied(sample), int(run == "second call"))
        eager, eager_error = attempt(plain, *copied(sample))
        before = dict(vitrify.counters)
        ours, our_error = attempt(compiled, *copied(sample))
        did = {k: v - before.get(k, 0) + (did.get(k, 0) if k in RAN_EAGERLY else 0) for k, v in dict(vitrify.counters).items()}
        if type(our_error) is not type(eager_error):
            raise Mismatch(f"{run}: raised {our_error!r:.200}, eager {eager_error!r:.200}")
        if eager_error is not None:
            did["raised"] = 1
            continue
        left, right = flat(ours), flat(eager)
        if [p for p, _ in left] != [p for p, _ in right]:
            raise Mismatch(f"{run}: {len(left)} leaves, eager {len(right)}")
        names = ("result", "gradient", "requires_grad", "gradient of gradients", "gradient's requires_grad")
        left = [(names[int(p[4])] + p[6:], v) for p, v in left]
        for i, ((name, a), (_, b)) in enumerate(zip(left, right)):
            if open_strides and name.startswith("gradient[") and a is not None and b is not None and a.stride() != b.stride() and open_strides(i, a, b):
                left[i] = name, torch.empty_strided(a.size(), b.stride(), dtype=a.dtype).copy_(a)
                did["open"] = did.get("open", 0) + 1
        # The gradient of what was broadcast is a sum, whose elements mix with others.
        most = max((v.numel() for p, v in right if isinstance(v, torch.Tensor)), default=0)
        each = (lambda leaf, most=most: elementwise if leaf.numel() == most else False) if elementwise else False
        # the reference has the inputs too, after the results
        unclear += check_leaves(run, zip(left, right), has_value, lambda: reference_run(plain, sample, len(right) + len(flat(sample, "in"))), each)
    return did | {"unclear": unclear}


CANCELS = {"tanh", "logaddexp"}  # 1 - y * y, and a + log1p(...) of another sign: what rounding one costs shows where both are nearly the same


def run_op(op, dtypes=None, samples=3, order=1) -> opinfo.Result:
    result = opinfo.Result(opinfo.name_of(op))
    if not (op.supports_autograd if order == 1 else op.supports_gradgrad):
        return result
    supported = op.supported_backward_dtypes("cpu")
    pointwise = opinfo.is_pointwise(op)
    fn = opinfo.function_of(op)
    for name, dtype in opinfo.taken(dtypes or (DTYPES if order == 1 else ["float64"]), DTYPES, supported):
        for number, sample in enumerate(opinfo.samples_of(op, dtype, samples, result, requires_grad=True)):
            packed = (sample.input, sample.args, sample.kwargs)
            opinfo.note(result, f"{name} sample {number}", lambda: compare(
                fn, packed, op.name not in opinfo.NO_VALUE, fp64_run if pointwise and order == 1 else conditioned_run,  # noqa: B023
                "mixed" if op.name in CANCELS else pointwise and order == 1, order=order))
        vitrify.reset()
    return result
