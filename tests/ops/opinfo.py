"""One op of torch's own op database, compiled beside eager: value, dtype, shape, strides, aliasing, mutation, errors."""
from __future__ import annotations

import itertools
import random
import warnings
from dataclasses import asdict, dataclass, field

import compile_times
import expects
import numpy
import torch
import vitrify

from compare import RAN_EAGERLY, Mismatch, compare, conditioned_run, fp64_run, internal_errors_raise

DTYPES = {"float32": torch.float32, "int64": torch.int64, "bool": torch.bool, "bfloat16": torch.bfloat16}
COMPLEX = {"complex64": torch.complex64, "complex128": torch.complex128}  # for ops that take none of the others
# Uninitialised memory: only metadata can be compared.
NO_VALUE = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_", "resize_as_"}
# What the engine says of samples that eager runs, by op, and why that must be. A sample that runs eagerly for another reason is a failure.
EAGER = {
    "as_strided": {"aten::as_strided reaches outside its tensor": "what lies before or behind an input is no input"},
    "as_strided.partial_views": {"aten::as_strided reaches outside its tensor": "what lies before or behind an input is no input"},
    "as_strided_copy": {"aten::as_strided reaches outside its tensor": "what lies before or behind an input is no input"},
    "as_strided_scatter": {"aten::as_strided reaches outside its tensor": "what lies before or behind an input is no input"},
    "empty_strided": {"returns a tensor that overlaps itself": "elements that share memory are no values of their own"},
    "item": {"reads a tensor's value: aten::item": "gives a Python number, and does nothing else"},
    "sparse.mm.reduce": {"a sparse tensor cannot be an input": "takes a sparse tensor"},
    "sparse.sampled_addmm": {"a sparse tensor cannot be an input": "takes a sparse tensor"},
    "to_sparse": {"makes a sparse or quantized tensor": "gives a sparse tensor"},
}


def database():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as definitions
    # The database seeds inside of its random ops; every run here is seeded from outside, so that the op itself is what is compiled.
    definitions.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return definitions.op_db


def name_of(op) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


@dataclass
class Result:
    op: str
    samples: int = 0
    passed: int = 0
    native: int = 0     # samples that ran generated kernels and nothing else
    mixed: int = 0      # generated kernels and extern calls
    extern: int = 0     # extern calls only
    fallback: int = 0   # run by eager, wholly or after a graph break
    views: int = 0      # nothing to run: views, constants
    errors: int = 0     # samples and error inputs that raised as eager does
    unclear: int = 0    # samples with results that differ, where eager's own mean nothing (compare.largest_spread)
    failures: list[str] = field(default_factory=list)
    reasons: dict[str, int] = field(default_factory=dict)  # why samples ran eagerly
    compiles: list[tuple[str, int, float]] = field(default_factory=list)  # of each sample: nodes and seconds (tests/compile_times.py)

    def json(self):
        return asdict(self)


autocast = False  # every op runs under it


def under_autocast(target):
    return torch.autocast("cpu", torch.bfloat16)(target) if autocast and target else target


def function_of(op):
    target = under_autocast(op.op)

    def call(input, args, kwargs):
        return target(input, *args, **kwargs)
    return call


def inplace_of(op):
    target = under_autocast(op.inplace_variant)

    def call(input, args, kwargs):
        return target(input, *args, **kwargs)
    return call


def ran_eagerly(did):
    return any(did.get(k, 0) for k in RAN_EAGERLY)


def without_kernels(result, none):
    """Announces an op that has no kernels in any sample; `none`: that it has not, or None for ops that nobody has looked at."""
    ours = bool(result.native or result.mixed)
    if none is not None:
        assert ours != none, f"{result.native} samples are native, {result.mixed} mixed, {result.extern} extern, {result.views} views"
    if result.errors == result.samples:
        expects.no_kernels("there are no samples on a CPU, or each raises")
    elif not ours:
        expects.compiled(f"{result.extern} samples are calls of ATen alone, {result.views} give only views")


def tally(result: Result, did: dict[str, int]):
    kernels, externs = did.get("kernels_launched", 0), did.get("externs_called", 0)
    if did.get("raised", 0):
        result.errors += 1
    elif ran_eagerly(did):
        result.fallback += 1
    elif kernels and externs:
        result.mixed += 1
    elif kernels:
        result.native += 1
    elif externs:
        result.extern += 1
    else:
        result.views += 1


ALL = 100000  # samples: no op has as many


def samples_of(op, dtype, count, result: Result, requires_grad=False):
    """The first samples, the same every time."""
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    try:
        return list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), count))
    except Exception as problem:  # the database itself cannot make samples here
        result.failures.append(f"{dtype}: no samples: {problem!r:.120}".removeprefix("torch."))
        return []


def note(result: Result, label, check):
    """One comparison; `check` raises, or returns what ran."""
    result.samples += 1
    try:
        with warnings.catch_warnings(record=True) as log, compile_times.Recorder() as record:
            warnings.filterwarnings("always", category=vitrify.VitrifyWarning)
            internal_errors_raise()
            did = check()
        result.compiles.append((label, record.values, round(record.seconds, 4)))
        tally(result, did)
        result.unclear += bool(did.get("unclear"))
        if ran_eagerly(did) and not did.get("raised", 0):
            reason = next((str(w.message) for w in log if issubclass(w.category, vitrify.VitrifyWarning)), "no reason given")
            reason = reason.partition(" runs eagerly: ")[2].partition(" (/")[0].partition("\n")[0] or reason
            result.reasons[reason] = result.reasons.get(reason, 0) + 1
            expects.eager(reason[:80], some=True)  # what is wrong about it is said here
            if not any(part in reason for part in EAGER.get(result.op, ())):
                raise Mismatch(f"runs eagerly: {reason}")
        result.passed += 1
    except Mismatch as wrong:
        result.failures.append(f"{label}: {wrong}")
    except Exception as problem:  # copying a sample or comparing failed: say so, it is a failure of this row
        result.failures.append(f"{label}: {type(problem).__name__}: {problem!s:.160}")


def taken(names, known, supported):
    """Of the dtypes of these names those that an op supports, or a complex one."""
    return [(n, known[n]) for n in names if known[n] in supported] or [(n, d) for n, d in COMPLEX.items() if d in supported][:1]


CANCELS = {"logaddexp"}  # a + log1p(exp(b - a)): what rounding the two costs shows where they are of other signs and nearly the same


def is_pointwise(op):
    return type(op).__name__ in {"UnaryUfuncInfo", "BinaryUfuncInfo"}


def run_op(op, dtypes=tuple(DTYPES), samples=4, errors=True) -> Result:
    result = Result(name_of(op))
    supported = op.supported_dtypes("cpu")
    has_value = op.name not in NO_VALUE
    pointwise = is_pointwise(op)
    for dtype_name, dtype in taken(dtypes, DTYPES, supported):
        for number, sample in enumerate(samples_of(op, dtype, samples, result)):
            packed = (sample.input, sample.args, sample.kwargs)
            variants = [("", function_of(op))]
            if op.inplace_variant is not None and number < 2 and not sample.broadcasts_input:
                variants.append((" in place", inplace_of(op)))
            runs = [(label, fn, packed) for label, fn in variants]
            if number == 0 and has_value:
                try:
                    strided = sample.noncontiguous()
                    runs.append((" noncontiguous", function_of(op), (strided.input, strided.args, strided.kwargs)))
                except Exception:  # samples that cannot be made so
                    pass
            for label, fn, packed in runs:
                note(result, f"{dtype_name} sample {number}{label}",
                     lambda: compare(fn, packed, has_value, fp64_run if pointwise and op.name not in CANCELS else conditioned_run, elementwise=pointwise))  # noqa: B023
        vitrify.reset()
    if errors and op.error_inputs_func is not None:
        run_errors(op, result)
    return result


def run_errors(op, result: Result):
    try:
        cases = list(op.error_inputs("cpu"))
    except Exception as problem:
        result.failures.append(f"no error inputs: {problem!r:.120}")
        return
    for number, case in enumerate(cases):
        sample = case.sample_input
        packed = (sample.input, sample.args, sample.kwargs)
        result.samples += 1
        try:
            compare(function_of(op), packed, has_value=False)
            result.passed += 1
            result.errors += 1
        except Mismatch as wrong:
            result.failures.append(f"error input {number}: {wrong}")
    vitrify.reset()
