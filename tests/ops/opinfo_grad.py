"""One op of torch's own op database, compiled in grad mode, with its gradient beside eager's: values, strides, None where eager has None, errors."""
from __future__ import annotations

import contextlib
import itertools

import torch
import vitrify

import opinfo
from compare import Mismatch, attempt, check_leaves, conditioned_run, copied, flat, fp64_run, tensors_of

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def with_gradient(fn, used=None, around=contextlib.nullcontext):
    """(results, gradients of all inputs that need them), through every result that has one; `used`: through those that it says (a function of their count).
    around: a context for the derivative."""
    def run(*sample):
        given = [t for _, t in tensors_of(sample) if t.requires_grad]
        out = fn(*sample)
        heads = [t for _, t in tensors_of(out) if t.requires_grad]
        grads = []
        if used and heads:
            heads = [heads[i] for i in used(len(heads))]
        if heads and given:
            weights = []
            for i, t in enumerate(heads):
                dtype = torch.complex128 if t.is_complex() else torch.float64
                weights.append(torch.randn(t.shape, generator=torch.Generator().manual_seed(i), dtype=dtype).to(t.dtype))
            with around():
                grads = list(torch.autograd.grad(heads, given, weights, allow_unused=True))
        return [t.detach() if isinstance(t, torch.Tensor) else t for _, t in flat(out)], grads, [t.requires_grad for _, t in tensors_of(out)]
    return run


def compare(fn, sample, has_value, reference_run, elementwise, used=None):
    """Raises Mismatch; returns what the second call launched, in both halves."""
    plain = with_gradient(fn, used)
    eager, eager_error = attempt(plain, *copied(sample))
    compiled = with_gradient(vitrify.compile(fn), used)
    did, unclear = {}, 0
    for run in ("first call", "second call"):
        before = dict(vitrify.counters)
        ours, our_error = attempt(compiled, *copied(sample))
        did = {k: v - before.get(k, 0) for k, v in dict(vitrify.counters).items()}
        if type(our_error) is not type(eager_error):
            raise Mismatch(f"{run}: raised {our_error!r:.200}, eager {eager_error!r:.200}")
        if eager_error is not None:
            continue
        left, right = flat(ours), flat(eager)
        if [p for p, _ in left] != [p for p, _ in right]:
            raise Mismatch(f"{run}: {len(left)} leaves, eager {len(right)}")
        names = ("result", "gradient", "requires_grad")
        left = [(names[int(p[4])] + p[6:], v) for p, v in left]
        # the reference has the inputs too, after the results
        unclear += check_leaves(run, zip(left, right), has_value, lambda: reference_run(plain, sample, len(right) + len(flat(sample, "in"))), elementwise)
    return did | {"unclear": unclear}


CANCELS = {"tanh"}  # 1 - y * y: what rounding y costs shows where y is near 1


def run_op(op, dtypes=tuple(DTYPES), samples=3) -> opinfo.Result:
    result = opinfo.Result(opinfo.name_of(op))
    if not op.supports_autograd:
        return result
    supported = op.supported_backward_dtypes("cpu")
    pointwise = type(op).__name__ in {"UnaryUfuncInfo", "BinaryUfuncInfo"}
    fn = opinfo.function_of(op)
    for name in dtypes:
        dtype = DTYPES[name]
        if dtype not in supported:
            continue
        torch.manual_seed(3)
        try:
            inputs = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=True), samples))
        except Exception as problem:  # the database itself cannot make samples here
            result.failures.append(f"{name}: no samples: {problem!r:.120}")
            continue
        for number, sample in enumerate(inputs):
            result.samples += 1
            packed = (sample.input, sample.args, sample.kwargs)
            try:
                opinfo.tally(result, compare(fn, packed, op.name not in opinfo.NO_VALUE, fp64_run if pointwise else conditioned_run, "mixed" if op.name in CANCELS else pointwise))
                result.passed += 1
            except Mismatch as wrong:
                result.failures.append(f"{name} sample {number}: {wrong}")
            except Exception as problem:  # copying a sample or comparing failed: say so, it is a failure of this row
                result.failures.append(f"{name} sample {number}: {type(problem).__name__}: {problem!s:.160}")
        vitrify.reset()
    return result
