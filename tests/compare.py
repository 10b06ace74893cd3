"""Compiled beside eager, in everything that eager promises: value, dtype, shape, strides, aliasing, mutation, version counters, exceptions."""
from __future__ import annotations

import contextlib
import copy
import itertools
import math
import re
import warnings

import torch
import vitrify
from torch.utils._python_dispatch import TorchDispatchMode


class Mismatch(Exception):
    pass


def internal_errors_raise():
    """A program that the engine fails on runs eagerly, with a warning: here that is a difference like any other."""
    warnings.filterwarnings("error", message="(?s).*internal error", category=vitrify.VitrifyWarning)


def flat(value, path="out"):
    """(path, leaf) of everything in a result, in order."""
    if isinstance(value, (tuple, list)):
        return [x for i, v in enumerate(value) for x in flat(v, f"{path}[{i}]")]
    if isinstance(value, dict):
        return [x for k, v in value.items() for x in flat(v, f"{path}[{k!r}]")]
    return [(path, value)]


def same(ours, eager):
    """Tensors are close, containers alike, and everything else is equal."""
    if isinstance(eager, torch.Tensor):
        torch.testing.assert_close(ours, eager)
    elif isinstance(eager, (list, tuple)):
        assert type(ours) is type(eager) and len(ours) == len(eager), (ours, eager)
        for a, b in zip(ours, eager):
            same(a, b)
    else:
        assert ours == eager


def containers(value):
    """Of which types what holds the leaves is, as nested as it is."""
    if isinstance(value, (tuple, list)):
        return type(value), [containers(v) for v in value]
    if isinstance(value, dict):
        return type(value), {k: containers(v) for k, v in value.items()}
    return None


def tensors_of(value):
    return [(p, v) for p, v in flat(value) if isinstance(v, torch.Tensor)]


def storage(t):
    return t.untyped_storage()._cdata


def versions_of(value):
    return [0 if t.is_inference() else t._version for _, t in tensors_of(value)]


def copied(value, memo=None):
    """A deep copy that keeps strides, offsets and sharing of storage; sparse tensors are cloned, anything else is shared."""
    memo = {} if memo is None else memo
    if isinstance(value, torch.Tensor):
        return copy.deepcopy(value, memo) if value.layout is torch.strided else value.clone()
    if isinstance(value, (tuple, list)):
        items = [copied(v, memo) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {k: copied(v, memo) for k, v in value.items()}
    return value


def halved(value, times):
    """Other numbers in the same place: what a call computes is not to be what an earlier one has computed. Not of what memory overlaps, or holds whole numbers: sizes and indices mean something."""
    for _, t in tensors_of(value):
        if times and t.layout is torch.strided and (t.is_floating_point() or t.is_complex()) and t.element_size() > 1 and 0 not in t.stride():
            try:
                t.data.mul_(0.5 ** times)
            except RuntimeError:  # it overlaps
                pass
    return value


def held(value):
    """What tensors hold: changed() says later of which that is no longer so."""
    return [(t, t.detach().clone()) for _, t in tensors_of(value) if t.layout is torch.strided and not t.is_meta]


def changed(held):
    return [not bits_equal(t.detach(), then) for t, then in held]


def bits_equal(a, b):
    if a.layout is not torch.strided or a.is_quantized:
        a, b = a.to_dense(), b.to_dense()
    a, b = a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg()
    if a.dtype is torch.complex32:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return torch.equal(a, b) or bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def relative(a, reference, scale):
    return ((a - reference).abs() / scale).max().item() if a.numel() else 0.0


SMALL = 1e-3  # of the largest: elements below count as this large


def distances(values, reference, dtype):
    """The largest error of any element: over the largest value, and over each element's own (of at least a thousandth of the largest). Below the least normal
    number of `dtype`, in which they were computed, roundings are as large as there."""
    if reference.numel() == 0:
        return 0.0, 0.0
    size, tiny = reference.abs(), torch.finfo(dtype).tiny
    top = size.max().clamp_min(tiny)
    return relative(values, reference, top), relative(values, reference, torch.maximum(size, SMALL * top).clamp_min(tiny))


def check_value(where, ours, eager, reference, spread=(0.0, 0.0), elementwise=True, decided=False):
    """Bitwise, or for floats at most twice eager's distance from fp64 (three times in half precision): over all elements, and element by element where
    no element mixes with others (a sum that cancels is exact in eager only by luck).

    elementwise="mixed": element by element, but an element may carry what rounding the largest one costs (x - mean(x), x - max - log(sum): the roundings
    inside such an op are of the size of its operands, and what is left after it cancels shows them).
    `decided`: what a rounding decides in eager (a tanh that is not 1 yet, which ATen's vectors and its last elements round differently) may be as double precision has it.
    `spread`: the two distances that eager itself moves by when what its ops round moves by a rounding, for long programs whose conditioning nobody knows."""
    if bits_equal(ours, eager):
        return
    if not (eager.is_floating_point() or eager.is_complex()):
        if decided and isinstance(reference, torch.Tensor) and reference.shape == eager.shape and reference.dtype == eager.dtype and torch.equal(ours[ours != eager], reference[ours != eager]):
            return
        raise Mismatch(f"{where}: values differ ({eager.dtype} must be bitwise)")
    if reference is None or reference.shape != eager.shape:
        raise Mismatch(f"{where}: values differ from eager and there is no fp64 run to compare with")
    wide = torch.complex128 if eager.is_complex() else torch.float64
    finite = eager.isfinite()
    # Where eager overflows and fp64 does not, the exact value is as good as eager's.
    exact = ~finite & torch.isclose(ours.to(wide), reference.to(wide), rtol=8 * torch.finfo(eager.dtype).eps, atol=0)
    other = ~finite & ~exact
    if not torch.equal(ours.isfinite() & ~exact, finite) or not bits_equal(ours[other], eager[other]):
        raise Mismatch(f"{where}: inf or NaN in other places than eager's")
    a, e, r = (t.resolve_conj().resolve_neg()[finite].to(wide) for t in (ours, eager, reference))
    known = r.isfinite()
    if not bits_equal(a[~known], e[~known]):
        raise Mismatch(f"{where}: differs from eager where fp64 is not finite")
    a, e, r = a[known], e[known], r[known]
    if a.numel() == 0:
        return
    factor = 3 if eager.dtype in (torch.float16, torch.bfloat16) else 2
    # Nothing is more exact than fp64 eager: its own last bits are no reference for themselves.
    floor = (64 if eager.dtype in (torch.float64, torch.complex128) else 4) * torch.finfo(eager.dtype).eps
    floors = floor, 4 * torch.finfo(eager.dtype).eps / SMALL if elementwise == "mixed" else floor
    figures = zip(("of the largest", "element by element"), distances(a, r, eager.dtype), distances(e, r, eager.dtype), spread, floors)
    for what, mine, theirs, moved, least in itertools.islice(figures, 2 if elementwise else 1):
        if not mine <= factor * max(theirs, moved) + least:
            raise Mismatch(f"{where}: error {mine:.2e} {what} against fp64, eager's {theirs:.2e}")


FORMATS = {4: (torch.contiguous_format, torch.channels_last), 5: (torch.contiguous_format, torch.channels_last_3d)}


def suggested_format(t):
    """What at::Tensor::suggest_memory_format() says, which decides how results of convolutions, poolings and norms lie."""
    return t.dim() in FORMATS and torch._prims_common.suggest_memory_format(t)


def as_strided_as(a, b):
    """Whether two layouts of one shape are the same to every op. The stride of a dim of one element addresses nothing: torch's own checks of layouts leave it out
    (is_contiguous, the contract of layouts by which gradients are kept, testing.assert_close of its compilers). It counts where it decides how a result lies."""
    if [s for n, s in zip(a.shape, a.stride()) if n != 1] != [s for n, s in zip(b.shape, b.stride()) if n != 1]:
        return False
    formats = FORMATS.get(a.dim(), (torch.contiguous_format,))
    if any(a.is_contiguous(memory_format=f) != b.is_contiguous(memory_format=f) for f in formats):
        return False
    # One channel is contiguous in every format, and suggests one by strides that address nothing.
    return a.dim() in FORMATS and a.shape[1] == 1 and a.is_contiguous() or suggested_format(a) == suggested_format(b)


def check_meta(where, a, b, of_gradient=False, anywhere=False, declared=False):
    """`of_gradient`: of one that a backward made, which may lie `anywhere` where docs/differences.md says so. Eager adds gradients up at the views between a leaf and a
    result, which are made one by one there and all at once here: strides of dims of one element come out otherwise, and are asked only where an op can tell. Of
    results they are eager's, but of those without elements where a custom op's fake has `declared` them: torch's own kernels and theirs differ there."""
    if type(a) is not type(b):
        raise Mismatch(f"{where}: type {type(a).__name__}, eager {type(b).__name__}")
    for what in ("dtype", "shape", "layout", "requires_grad"):
        if getattr(a, what) != getattr(b, what):
            raise Mismatch(f"{where}: {what} {getattr(a, what)}, eager {getattr(b, what)}")
    if b.layout is torch.strided:
        nothing = declared and not of_gradient and not b.numel()
        if a.stride() != b.stride() and not (of_gradient and (anywhere or b.numel() and as_strided_as(a, b)) or nothing and as_strided_as(a, b)):
            raise Mismatch(f"{where}: strides {a.stride()}, eager {b.stride()}")
        if a.is_conj() != b.is_conj() or a.is_neg() != b.is_neg():
            raise Mismatch(f"{where}: conj or neg bit differs")


def alias_pattern(result, inputs):
    """For each output tensor: which input it is, which input's or earlier output's storage it shares, and where it lies there (from where that output does)."""
    ins = [t for _, t in tensors_of(inputs)]
    pattern, seen = [], []
    for _, t in tensors_of(result):
        if t.layout is not torch.strided:
            pattern.append("sparse")
            continue
        same = next((i for i, x in enumerate(ins) if x is t), None)
        shared = next((i for i, x in enumerate(ins) if x.layout is torch.strided and t.numel() and storage(x) == storage(t)), None)
        earlier = next((i for i, x in enumerate(seen) if x.layout is torch.strided and t.numel() and storage(x) == storage(t)), None)
        start = 0 if shared is not None else seen[earlier].storage_offset() if earlier is not None else None
        pattern.append((same, shared, earlier, t.storage_offset() - start if start is not None else None))
        seen.append(t)
    return pattern


def widen(value):
    if isinstance(value, torch.Tensor):
        return value.to(torch.complex128) if value.is_complex() else value.double() if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(widen(v) for v in value) if not hasattr(value, "_fields") else type(value)(*(widen(v) for v in value))
    if isinstance(value, dict):
        return {k: widen(v) for k, v in value.items()}
    return torch.float64 if value in (torch.float32, torch.bfloat16, torch.float16) and isinstance(value, torch.dtype) else value


def first_line(error):
    """What an error says. Version errors name a tensor that a node saved: ours saves others, and eager's own number grows where a tensor is shared by calls."""
    return re.sub(r"\[[\w.]+ \[.*?\]\](, which is output \d+ of [\w:]+,)? is at version \d+; expected version \d+ instead", "T was written", str(error).partition("\n")[0])


def attempt(fn, *args):
    torch.manual_seed(11)
    try:
        return fn(*args), None
    except Exception as problem:
        return None, problem


def attempt_wide(fn, *args):
    """In double throughout: also what integers and numbers become."""
    torch.set_default_dtype(torch.float64)
    try:
        return attempt(fn, *args)
    finally:
        torch.set_default_dtype(torch.float32)


def fp64_run(fn, sample, count):
    """The leaves of result and inputs of an fp64 run, in order, with the spread allowed for each (None: nothing can be said of it); a None leaf where there is no such run."""
    given = widen(copied(sample))
    wide, _ = attempt_wide(fn, *given)
    leaves = [v for _, v in flat(wide)] + [v for _, v in flat(given, "in")]
    exact = (0.0, 0.0)
    return [(v, exact) for v in leaves] if len(leaves) == count else [(None, exact)] * count


def steps(like, seed):
    """Factors one unit in the last place above or below 1. Of halves also half of one, and none, wider than they are: what the number next to one decides is rare."""
    g, eps = torch.Generator().manual_seed(seed), torch.finfo(like.dtype).eps
    if like.dtype in (torch.float16, torch.bfloat16):
        return 1 + eps * torch.tensor([0, 0, 0, 0, 0.5, -0.5, 1, -1])[torch.randint(0, 8, like.shape, generator=g)]
    return 1 + eps * (2 * torch.randint(0, 2, like.shape, generator=g) - 1).to(like.dtype)


def move_inputs(given, seed):
    """By one unit in the last place: all of a tensor's memory, whatever its strides. Not the half types, in which nothing is computed."""
    for _, value in tensors_of(given):
        if value.layout is torch.strided and value.dtype in (torch.float32, torch.float64):
            memory = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
            memory.mul_(steps(memory, seed))


SUBTRACTS_FROM = {"aten::_log_softmax_backward_data": 0}  # the argument that such an op's result is the rest of: what is left after it cancels shows its rounding


class Jolts(TorchDispatchMode):
    """Moves what every op gives by one unit in the last place, of the result or of what it subtracts from: any correct implementation of the op may."""

    def __init__(self, seed):
        super().__init__()
        self.seed = 1000 * seed

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not any(r.alias_info for r in func._schema.returns):
            for _, t in tensors_of(out):
                if t.layout is torch.strided and t.is_floating_point() and t.numel() and not t._is_zerotensor():
                    self.seed += 1
                    step = steps(t, self.seed)
                    t.mul_(step)
                    if (whole := SUBTRACTS_FROM.get(func._schema.name)) is not None:
                        t.add_(args[whole] * (step - 1))
        return out


def largest_spread(dtype):
    """Of the largest: what eager moves by more, for a rounding, means nothing."""
    return max(1e-2, 4 * torch.finfo(dtype).eps)


def conditioned_run(fn, sample, count):
    """fp64_run, with how far eager moves when its inputs and what its ops round move: sums that cancel, and smallest singular values, are no better known."""
    reference = fp64_run(fn, sample, count)
    spreads, limits = [[0.0, 0.0] for _ in reference], [math.inf for _ in reference]
    plain = None
    for seed in range(5):
        given = copied(sample)
        if seed:
            move_inputs(given, seed)
        with Jolts(seed) if seed else contextlib.nullcontext():
            out, problem = attempt(fn, *given)
        leaves = [v for _, v in flat(out)] + [v for _, v in flat(given, "in")]
        if problem or len(leaves) != count:
            return reference
        plain = plain or leaves
        for i, (spread, p, q) in enumerate(zip(spreads, plain, leaves)):
            if isinstance(p, torch.Tensor) and p.layout is torch.strided and p.is_floating_point() and p.shape == q.shape:
                limits[i] = largest_spread(p.dtype)
                keep = p.isfinite() & q.isfinite()
                spread[:] = map(max, spread, distances(q[keep].double(), p[keep].double(), p.dtype))
    return [(r, tuple(s) if s[0] <= limit else None) for (r, _), s, limit in zip(reference, spreads, limits)]


def check_leaves(run, pairs, has_value, reference, elementwise):
    """Each of ours beside eager's, as ((path, ours), (path, eager's)). `reference`: gives fp64_run's leaves, once. `elementwise`: check_value's, or a function
    of eager's leaf. Returns how many differ from what means nothing."""
    leaves, unclear = None, 0
    for index, ((where, a), (_, b)) in enumerate(pairs):
        where = f"{run}, {where}"
        if not isinstance(b, torch.Tensor) or not isinstance(a, torch.Tensor):
            if type(a) is not type(b) or not (a is b or a == b or (a != a and b != b)):
                raise Mismatch(f"{where}: {a!r:.80}, eager {b!r:.80}")
            continue
        check_meta(where, a, b)
        if not has_value or bits_equal(a, b):
            continue
        if leaves is None:
            leaves = reference()
        r, spread = leaves[index]
        if spread is None:
            unclear += 1
            continue
        check_value(where, a, b, r.detach() if isinstance(r, torch.Tensor) else None, spread, elementwise(b) if callable(elementwise) else elementwise)
    return unclear


RAN_EAGERLY = ("fallbacks", "eager_calls", "graph_breaks")  # counters that no call of a sample may move


def compare(fn, sample, has_value=True, reference_run=fp64_run, elementwise=True) -> dict[str, int]:
    """Runs fn(*sample) eagerly and compiled on copies of the sample, and again with half its numbers; raises Mismatch. Returns what the second compiled call launched,
    what either ran eagerly, and, as "unclear", how many leaves differ from eager's where the reference says that eager's own mean nothing."""
    compiled = vitrify.compile(fn)
    did: dict[str, int] = {}
    unclear, first = 0, []
    for run in ("first call", "second call"):
        sample = halved(copied(sample), int(run == "second call"))
        given_eager = copied(sample)
        versions_eager = versions_of(given_eager)
        eager, eager_error = attempt(fn, *given_eager)
        random_eager = torch.get_rng_state()
        bumps_eager = [now - before for now, before in zip(versions_of(given_eager), versions_eager)]
        given = copied(sample)
        versions = versions_of(given)
        before = dict(vitrify.counters)
        ours, our_error = attempt(compiled, *given)
        random = torch.get_rng_state()
        did = {k: v - before.get(k, 0) + (did.get(k, 0) if k in RAN_EAGERLY else 0) for k, v in dict(vitrify.counters).items()}
        if type(our_error) is not type(eager_error) or first_line(our_error) != first_line(eager_error):
            raise Mismatch(f"{run}: raised {our_error!r:.200}, eager {eager_error!r:.200}")
        bumps = [now - then for now, then in zip(versions_of(given), versions)]
        if bumps != bumps_eager:
            raise Mismatch(f"{run}: version counters of the inputs moved by {bumps}, eager's by {bumps_eager}")
        if not torch.equal(random, random_eager):
            raise Mismatch(f"{run}: the random state differs")
        if eager_error is not None:
            did["raised"] = 1
            unclear += check_leaves(run, zip(flat(given, "in"), flat(given_eager, "in")), has_value, lambda: [(None, (0.0, 0.0))] * len(flat(given)), elementwise)
            continue
        left, right = flat(ours), flat(eager)
        if [p for p, _ in left] != [p for p, _ in right] or containers(ours) != containers(eager):
            raise Mismatch(f"{run}: structure {containers(ours)}, eager {containers(eager)}")
        if alias_pattern(ours, given) != alias_pattern(eager, given_eager):
            raise Mismatch(f"{run}: aliasing {alias_pattern(ours, given)}, eager {alias_pattern(eager, given_eager)} (input it is, input shared, output shared, offset)")
        pairs = list(itertools.chain(zip(left, right), zip(flat(given, "in"), flat(given_eager, "in"))))
        unclear += check_leaves(run, pairs, has_value, lambda: reference_run(fn, sample, len(pairs)), elementwise)  # noqa: B023
        if any(map(any, map(changed, first))):
            raise Mismatch("the second call wrote over what the first has given")
        first = [held(ours)]
    return did | {"unclear": unclear}
