"""What a program means: eager beside double precision, and beside itself where all that rounds is moved by a rounding; and whether the compiled one means the same."""
from __future__ import annotations

import dataclasses
import functools
import math
import re
import warnings

import scope
import torch
import torch._decomp
import vitrify
from vitrify import _C
from calls import Side
from compare import FORMATS, Mismatch, alias_pattern, bits_equal, changed, check_meta, check_value, containers, distances, first_line, held, largest_spread, steps, storage, tensors_of
from torch.utils._python_dispatch import TorchDispatchMode

# Ops that give their operands' values, or values that no rounding touches. All others may round otherwise in any correct implementation.
EXACT = set("""abs neg relu relu_ floor ceil round trunc sign sgn clamp clamp_ clamp_min clamp_max clamp_min_ clamp_max_ nan_to_num isnan isfinite isinf signbit clone copy_ _to_copy fill_ zero_
    zeros zeros_like ones ones_like full full_like new_zeros new_full new_ones empty empty_like empty_strided new_empty new_empty_strided scalar_tensor arange eye tril triu tril_ triu_
    maximum minimum fmax fmin lt le gt ge eq ne logical_not logical_and logical_or where masked_fill masked_fill_ amax amin argmax argmin max min any all flip roll cat stack index index_select
    gather scatter scatter_ index_put index_put_ index_copy index_copy_ index_fill index_fill_ constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d topk sort argsort
    nonzero masked_select _unique2 unique_consecutive unique_dim max_pool2d_with_indices adaptive_max_pool2d max_pool3d_with_indices threshold hardtanh heaviside copysign median mode nanmedian
    count_nonzero cummax cummin repeat repeat_interleave masked_scatter masked_scatter_ embedding kthvalue aminmax bincount histc searchsorted bucketize resize_ resize_as_ set_ lift_fresh _local_scalar_dense
    take im2col isclose equal select_scatter slice_scatter diagonal_scatter as_strided_scatter nextafter bitwise_and bitwise_or view_as_real complex real imag _foreach_copy_ _foreach_zero_ _foreach_neg
    relu_backward threshold_backward masked_fill detach alias conj neg_view _conj _neg_view resolve_conj resolve_neg upsample_nearest2d pixel_shuffle pixel_unshuffle channel_shuffle is_nonzero item""".split())


ODD = 0x1D8E4E27C47D124F  # any odd number whose bits are mixed


def short(func):
    return func._schema.name.partition("::")[2]


def is_view(func):
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


class Watch(TorchDispatchMode):
    """Which ops an eager run has, and the numbers that it draws."""

    def __init__(self):
        super().__init__()
        self.draws, self.made = [], {}  # made: by which op a memory was written last

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not is_view(func):
            # kernels of ours compute no complex numbers: ATen's do
            name = "" if any(t.is_complex() for _, t in tensors_of([args, kwargs or {}, out])) else short(func)
            self.made |= {storage(t): (name, t) for _, t in tensors_of(out) if t.layout is torch.strided}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws.append(out.detach().clone() if isinstance(out, torch.Tensor) else None)
        return out


class Replay(TorchDispatchMode):
    """Gives the numbers that another run drew: in double precision other ones would be drawn."""

    def __init__(self, draws):
        super().__init__()
        self.draws = list(draws)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and self.draws:
            drawn = self.draws.pop(0)
            if isinstance(out, torch.Tensor) and drawn is not None and drawn.shape == out.shape:
                out.copy_(drawn)
        return out


class Straight(Replay):
    """What ops compute is computed of operands in contiguous memory, and put where eager has it: in which strides they come is to change no value.
    So are elements of halves in vectors, of which those left over are rounded more often."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if is_view(func) or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags or short(func).startswith(("as_strided", "empty")):
            return out
        plain = elsewhere(func, args, kwargs, False, HALVES)
        if plain is None:
            plain = func(*(a.clone(memory_format=torch.contiguous_format) if isinstance(a, torch.Tensor) and a.layout is torch.strided else a for a in args), **kwargs)
        for (_, t), (_, other) in zip(tensors_of(out), tensors_of(plain)):
            writable = torch.is_inference_mode_enabled() or not t.is_inference()
            if t.layout is torch.strided and t.shape == other.shape and writable and not t._is_zerotensor() and 0 not in t.stride():
                t.copy_(other)
        return out


def memory_moved(t, steps):
    """A copy with the same strides, all of its memory moved by a unit in the last place."""
    storage = t.untyped_storage().clone()
    whole = torch.empty(0, dtype=t.dtype).set_(storage)
    whole.mul_(steps(whole))
    return torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.size(), t.stride())


SINGLE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
HALVES = (torch.float16, torch.bfloat16)


LONG = 512  # products of rows as long as this are added up in another order too
REDUCTIONS = ("sum", "mean", "var", "std", "var_mean")  # their second argument says over which dims


# Elementwise ops that torch has not tagged so. Many decide otherwise of a NaN, or of an infinity, where their vectors do than where single elements are left.
ELEMENTWISE = set("""hardtanh_backward softshrink_backward hardshrink_backward elu_backward softplus_backward leaky_relu_backward hardswish_backward hardsigmoid_backward mish_backward
    log_sigmoid_backward hardtanh hardswish hardsigmoid softplus softshrink hardshrink leaky_relu""".split())
REARRANGED = ("native_layer_norm_backward", "native_group_norm_backward")  # torch has other formulas for them, for its own compilers


def elsewhere(func, args, kwargs, single, dtypes=SINGLE):
    """An elementwise op with each element in a vector, or by itself: where it lies in its tensor is chance. None of others."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if func._schema.is_mutable or not (torch.Tag.pointwise in func.tags or short(func) in ELEMENTWISE) or any(t.dtype not in dtypes or t.is_complex() for t in tensors):
        return None
    if len({(t.dtype, t.dim() == 0) for t in tensors}) != 1 or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    out = func(*args, **kwargs)
    if not isinstance(out, torch.Tensor) or not out.numel() or out.shape != torch.broadcast_shapes(*(t.shape for t in tensors)):
        return None

    def moved(t):
        flat = t.expand(out.shape).reshape(-1)
        return flat.repeat_interleave(2)[::2] if single else torch.cat([flat, flat.new_ones(-len(flat) % 64)])
    return out.copy_(func(*(moved(a) if isinstance(a, torch.Tensor) else a for a in args), **kwargs)[:out.numel()].view(out.shape))


def overflows_on_the_way(func, a, b):
    """Whether products of finite numbers have no finite sum: what overflows first, and with which sign, is the order's; a fused product is not rounded by itself."""
    return bool(a.isfinite().all() and b.isfinite().all()) and not func(a, b).isfinite().all()


def in_another_order(func, args, kwargs, single=False):
    """The same, added up otherwise, which is as right: products one term after the other, as oneDNN does (what rounds the same way each time does not cancel
    then; infinities of both signs meet or not), reductions from the last element on, gelu's formula with what it adds to 1 moved, gradients of norms by another formula; or with its elements elsewhere. None of other ops."""
    name = short(func)
    if name in REARRANGED:
        return torch._decomp.decomposition_table[func](*args, **kwargs)
    if name in REDUCTIONS and func._overloadname in ("default", "dim_IntList", "dim", "correction"):
        x, dims = args[0], args[1] if len(args) > 1 and args[1] else range(args[0].dim())
        if name == "var" and func._overloadname == "correction" and not x.is_complex() and x.numel() > LONG:  # in one pass, as eager has it, roundings grow with the row: in two they do not
            correction, count = kwargs.get("correction"), x.numel() // max(1, func(x, *args[1:], **kwargs).numel())
            squares = (x - x.mean(tuple(dims), keepdim=True)).square().sum(tuple(dims), keepdim=kwargs.get("keepdim", False))
            return squares / (count - (1 if correction is None else correction))
        turned = x.flip(tuple(dims))
        return func(turned.mul_(steps(turned, x.numel())) if turned.dtype in SINGLE else turned, *args[1:], **kwargs)  # also of what lies in one place, each step is rounded
    if name == "prod" and func._overloadname == "dim_int":  # what vanishes on the way meets an infinity or not
        out = func(args[0].flip(args[1]), *args[1:], **kwargs)
        if out.dtype not in SINGLE:
            return out
        sizes, limits = args[0].abs().double().log2(), torch.finfo(out.dtype)
        either = (sizes.clamp(min=0).sum(*args[1:]) > math.log2(limits.max)) & (sizes.clamp(max=0).sum(*args[1:]) < math.log2(limits.tiny))
        return torch.where(either, torch.where(out.isnan(), 0, torch.nan), out).to(out.dtype)
    if name == "logsumexp" and args[0].is_floating_point():  # the logarithm and what was taken away before it may cancel to nothing, or to a rounding
        most = args[0].amax(args[1], True)
        most = most.masked_fill(most.isinf(), 0)
        sums = (args[0] - most).exp().sum(args[1], True).log()
        out = (sums * steps(sums, 1) + most).to(args[0].dtype)
        return out if len(args) > 2 and args[2] else out.sum(args[1])
    if name == "gelu" and args[0].is_floating_point():  # what it adds to 1 is rounded, and may be -1 or not
        x = args[0].float() if args[0].element_size() < 4 else args[0]
        t = torch.tanh(0.7978845608028654 * (x + 0.044715 * x ** 3)) if kwargs.get("approximate") == "tanh" else torch.erf(0.7071067811865476 * x)
        return (0.5 * x * (1 + t * steps(t, 1))).to(args[0].dtype)
    if name == "convolution" and args[0].dim() in FORMATS and not kwargs:  # what only padding meets is multiplied by zero or left out, by the memory's format
        plain, other = FORMATS[args[0].dim()]
        return func(args[0], args[1].contiguous(memory_format=other if args[1].is_contiguous() else plain), *args[2:])
    if name not in ("mm", "bmm", "addmm", "baddbmm") or kwargs:
        return elsewhere(func, args, kwargs, single)
    *added, a, b = args
    if added:
        total = in_another_order(torch.ops.aten.mm.default if name == "addmm" else torch.ops.aten.bmm.default, (a, b), {}, single)
        return None if total is None else added[0] + total
    if a.dtype is not torch.float32 or (a.shape[-1] < LONG and not overflows_on_the_way(func, a, b)):
        return None
    total = torch.zeros(*a.shape[:-1], b.shape[-1])
    for k in range(a.shape[-1]):
        total += a[..., k:k + 1] * b[..., k:k + 1, :]
    return total


def cancelled(func, x, out):
    """A variance that is nothing but roundings may be zero as well, and what a norm of halves has left of a mean that it took away: what decides by it has no meaning."""
    name = short(func)
    if name == "native_layer_norm" and x.dtype not in SINGLE and x.numel():
        bound = 4 * torch.finfo(x.dtype).eps * x.float().abs().nan_to_num().max() * out[2].float()
        return torch.where(out[0].float().abs() <= bound, 0, out[0]).to(x.dtype).as_strided(out[0].shape, out[0].stride()), *out[1:]
    if name not in ("var", "std") or not isinstance(x, torch.Tensor) or not x.numel() or not x.is_floating_point():
        return out
    bound = 4 * torch.finfo(x.dtype).eps * x.abs().nan_to_num().max()
    return torch.where(out <= (bound if name == "std" else bound ** 2), 0, out)


def with_signs(func, args, sign):
    """Nobody says which sign a NaN has, nor one of a zero that was computed (docs/differences.md); its bits tell, and some functions."""
    if short(func) not in ("copysign", "signbit", "atan2", "div", "reciprocal") and func is not torch.ops.aten.view.dtype:
        return args
    return [torch.where(a.isnan() | (a == 0), torch.copysign(a, sign), a) if isinstance(a, torch.Tensor) and a.is_floating_point() and (a.isnan() | (a == 0)).any() else a for a in args]


class Jolts(TorchDispatchMode):
    """Moves what every op that rounds reads and gives by a unit in the last place: what it adds up inside is rounded too."""

    def __init__(self, seed):
        super().__init__()
        self.seed, self.in_turn, self.single = 100003 * seed, seed % 2 == 1, seed % 4 == 1
        self.sign = 1 if seed % 2 else -1
        self.alike = seed % 4 == 2  # what is equal moves alike: a function rounds one number in one way, and sums of such roundings grow

    def steps(self, t):
        self.seed += 1
        if not self.alike or t.dtype not in (torch.float32, torch.float64):
            return steps(t, self.seed)
        bits = (t + 0).view(torch.int32 if t.dtype is torch.float32 else torch.int64).long()  # of both zeros the same
        mixed = (bits ^ self.seed * ODD % 2 ** 61) * ODD  # hashed: sorting all that is equal together takes too long
        mixed = (mixed ^ mixed >> 31) * ODD
        return 1 + torch.finfo(t.dtype).eps * (1 | mixed >> 63).to(t.dtype)

    def moved(self, t):
        if not isinstance(t, torch.Tensor) or t.layout is not torch.strided or t.dtype not in SINGLE or not t.numel() or t.is_conj() or t.is_neg() or t._is_zerotensor():
            return t
        return memory_moved(t, self.steps)

    def in_single(self, func, read, written, kwargs):
        """What an op gives in single precision of halves - statistics, gradients of weights - it has added up in single precision: that is rounded. None of others."""
        halves = [isinstance(a, torch.Tensor) and not w and a.dtype in HALVES and bool(a.numel()) for a, w in zip(read, written)]
        if not any(halves) or "out" in kwargs or func._schema.name.endswith("_"):
            return None
        alike = func(*(a.clone() if w and isinstance(a, torch.Tensor) else a for a, w in zip(read, written)), **kwargs)
        given = [a for a, w in zip(read, written) if w and isinstance(a, torch.Tensor)]
        if all(t.dtype not in SINGLE for _, t in tensors_of([alike, given])):
            return None
        wide = func(*(self.moved(a.float()) if half else a for a, half in zip(read, halves)), **kwargs)
        outs = [t.to(like.dtype) if isinstance(like, torch.Tensor) and isinstance(t, torch.Tensor) else like for t, like in zip(*([o] if isinstance(o, torch.Tensor) else o for o in (wide, alike)))]
        return outs[0] if isinstance(alike, torch.Tensor) else tuple(outs)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:  # in inference mode composites arrive whole
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        draws = torch.Tag.nondeterministic_seeded in func.tags and short(func) != "native_dropout"  # which also multiplies
        if short(func) in EXACT or is_view(func) or draws:
            return func(*(args if self.single else with_signs(func, args, self.sign)), **kwargs)
        written = [a.alias_info is not None for a in func._schema.arguments]
        args = args if self.single else with_signs(func, args, self.sign)
        read = [a if w else [self.moved(x) for x in a] if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size) else self.moved(a) for a, w in zip(args, written)]
        out = self.in_single(func, read, written, kwargs)
        out = in_another_order(func, read, kwargs, self.single) if self.in_turn and out is None else out
        out = func(*read, **kwargs) if out is None else out
        out = cancelled(func, read[0], out) if self.in_turn and read else out
        given = [t for _, t in tensors_of([a for a, w in zip(args, written) if w])]
        for _, t in tensors_of([out if not given else [], given, list(kwargs.values()) if "out" in kwargs else []]):
            writable = torch.is_inference_mode_enabled() or not t.is_inference()
            if t.layout is torch.strided and (t.is_floating_point() or t.is_complex()) and t.numel() and not t._is_zerotensor() and writable and 0 not in t.stride():
                t.mul_(self.steps(t))
        return out


class InternalError(Mismatch):
    """Whatever the program means."""


class OfValues(Mismatch):
    """Numbers differ: nothing else does that an error, a layout, an alias or a version would show."""


class Reference:
    """Per call and leaf: its value in double precision (or eager's, where there is no such run), and how far eager's moves; None where it means nothing.
    Each run is made when it is first asked for: what equals eager's bit for bit needs none. tell(None): eager runs, until tell({})."""

    def __init__(self, program, tell=lambda at: None):
        self.program, self.moved, self.watch, self.tell = program, [], Watch(), tell

    @functools.cached_property
    def plain(self):
        return self.run(around=lambda: self.watch)

    @functools.cached_property
    def wide(self):
        draws = self.watch.draws if self.plain else []
        return self.run(wide=True, around=lambda replay=Replay(draws): replay) if "view(torch." not in self.program.body.source else None

    @functools.cached_property
    def bare(self):
        """In double precision with nothing watching: autograd takes formulas under a mode that differ from eager's where they divide by nothing."""
        return self.run(wide=True) if self.wide is not None else None

    @functools.cached_property
    def straight(self):
        """Of operands in contiguous memory."""
        draws = self.watch.draws if self.plain else []
        return self.run(around=lambda mode=Straight(draws): mode)

    def run(self, **how):
        default = torch.get_default_dtype()
        if how.get("wide"):
            torch.set_default_dtype(torch.float64)
        self.tell(None)
        try:
            side = Side(self.program, **how)
            made = []
            for i, call in enumerate(self.program.calls):
                outcome = side.make(call, i)
                made.append((outcome.error, outcome.kept(), outcome.states))
            return made
        except (RuntimeError, TypeError, ValueError):  # the net cannot be made in double precision
            return None
        finally:
            torch.set_default_dtype(default)
            self.tell({})

    def move(self, count):
        """Up to this many runs that roundings have moved."""
        for seed in range(len(self.moved) + 1, count + 1):
            mode = Jolts(seed)
            self.moved.append(self.run(jolt=seed, around=lambda mode=mode: mode))

    def leaf(self, call, index, eager=None):
        error, leaves = self.plain[call][:2]
        plain = leaves[index][1] if index < len(leaves) else None
        if not isinstance(plain, torch.Tensor):  # watched, eager gives something else: a gradient that is none, say
            return None, None if isinstance(eager, torch.Tensor) else (0.0, 0.0)
        if eager is not None and (eager.shape != plain.shape or not torch.equal(eager.isfinite(), plain.isfinite())):  # it may raise where nobody watches, or not
            return (self.bare[call][1][index][1], (0.0, 0.0)) if self.near(call, index, eager, self.bare) else (None, None)
        others = []
        for run in self.moved:
            if run is None:
                continue
            if type(run[call][0]) is not type(error) or len(run[call][1]) != len(leaves):
                return None, None
            others.append(run[call][1][index][1])
        wide = None
        if self.wide is not None and type(self.wide[call][0]) is type(error) and len(self.wide[call][1]) == len(leaves):
            wide = self.wide[call][1][index][1]
        value, spread = meaning(plain, others, wide)
        return value, spread and self.with_sums(call, plain, spread)

    def with_sums(self, call, plain, spread):
        """Of doubles nothing is more exact, and what rounds within one op no run above has moved: a sum of n terms rounds n times, the one way where they are equal (of an expanded tensor)."""
        if plain.dtype not in (torch.float64, torch.complex128):
            return spread
        terms = max((math.prod(spec.shape) for c in self.program.calls[:call + 1] for spec in c.specs or ()), default=0)
        return max(spread[0], terms * torch.finfo(plain.dtype).eps / 16), spread[1]

    def near(self, call, index, eager, run):
        """Whether eager's value is that of this run in double precision but for roundings: then that alone says what is right."""
        if run is None or type(run[call][0]) is not type(self.plain[call][0]) or len(run[call][1]) != len(self.plain[call][1]):
            return False
        if index >= len(run[call][1]):
            return False
        wide = run[call][1][index][1]
        if not (eager.is_floating_point() or eager.is_complex()) or not isinstance(wide, torch.Tensor) or wide.shape != eager.shape:
            return False
        keep = eager.isfinite()
        return torch.equal(keep, wide.isfinite()) and distances(eager[keep].to(wide.dtype), wide[keep], eager.dtype)[0] <= largest_spread(eager.dtype)

    def of_its_own(self, call, index, eager):
        """What eager has of contiguous operands where it contradicts itself: of those in other strides it computes something else."""
        if self.straight is None or type(self.straight[call][0]) is not type(self.plain[call][0]) or len(self.straight[call][1]) != len(self.plain[call][1]):
            return None
        straight = self.straight[call][1][index][1]
        if not isinstance(straight, torch.Tensor) or straight.shape != eager.shape or straight.dtype != eager.dtype or not (eager.is_floating_point() or eager.is_complex()):
            return None
        exact, keep = torch.complex128 if eager.is_complex() else torch.float64, eager.isfinite() & straight.isfinite()
        apart = not torch.equal(eager.isfinite(), straight.isfinite())
        return straight if apart or distances(eager[keep].to(exact), straight[keep].to(exact), eager.dtype)[0] > largest_spread(eager.dtype) else None

    def overflows(self, call, index, ours, eager):
        """Whether eager has an infinity or none only since its type holds no more in between, in a derivative's formula: ours may not come there, and nobody says how far it may be off."""
        if self.wide is None or len(self.wide[call][1]) != len(self.plain[call][1]):
            return False
        wide = self.wide[call][1][index][1]
        if not isinstance(wide, torch.Tensor) or wide.shape != eager.shape or not (eager.is_floating_point() or eager.is_complex()):
            return False
        held = wide.to(eager.dtype)
        apart = (ours.isfinite() != eager.isfinite()) | (ours.isnan() != eager.isnan()) | (ours.isinf() & eager.isinf() & (ours.sgn() != eager.sgn()))
        return bool(apart.any()) and not eager[apart].isfinite().any() and bool(wide[apart].isfinite().all()) and torch.equal(ours[apart].isfinite(), held[apart].isfinite()) and not ours[apart].isnan().any()

    def decides(self, call, of, eager):
        """Whether a rounding decides about this, of which eager has `eager`: `of` what a run has of the call. A mode alone moves what kernels call under autocast."""
        self.move(MANY)
        return any(run is not None and of(run[call]) != eager for run in [self.plain, *self.moved])

    def meaningless(self):
        """(call, path) of the leaves that say nothing."""
        self.move(JOLTS)
        return [(c, path) for c, run in enumerate(self.plain) for i, (path, v) in enumerate(run[1]) if isinstance(v, torch.Tensor) and self.leaf(c, i)[1] is None]


JOLTS, MANY = 4, 16


def meaning(plain, others, wide):
    spread = [0.0, 0.0]
    number = plain.is_floating_point() or plain.is_complex()
    for other in others:
        if not isinstance(other, torch.Tensor) or plain.shape != other.shape:
            return None, None
        if not number:
            if not torch.equal(plain, other):
                return None, None
            continue
        keep = plain.isfinite()
        if not torch.equal(keep, other.isfinite()) or not bits_equal(plain[~keep], other[~keep]):
            return None, None
        exact = torch.complex128 if plain.is_complex() else torch.float64
        spread = [max(p) for p in zip(spread, distances(other[keep].to(exact), plain[keep].to(exact), plain.dtype))]
    if number and spread[0] > largest_spread(plain.dtype):
        return None, None
    if number and (not isinstance(wide, torch.Tensor) or wide.shape != plain.shape or not torch.equal(wide.isfinite(), plain.isfinite())):
        wide = plain.to(torch.complex128 if plain.is_complex() else torch.float64)
        spread = [2 * s for s in spread]
    return wide, tuple(spread)


def errors_of(program):
    """Of its calls, run eagerly in as much memory as a line may ask for: arguments of other sizes can make more of it."""
    with scope.bounded():
        side = Side(program)
        return [side.make(call, i).error for i, call in enumerate(program.calls)]


MIXED = ("_norm(", "softmax(", "logsumexp(", ".mean(", ".var(", ".std(", "self.m", "_loss", "checkpoint(")


def history(t):
    """Whether it has one, and is a leaf; some views forbid the question."""
    try:
        return t.grad_fn is not None, t.is_leaf
    except RuntimeError as e:
        return first_line(e)


def same_call(where, ours, eager, check, drawn=lambda what: False, found=lambda what: False, declared=False):
    """Everything but values; check(index, path, ours, eager) for each leaf; drawn(index): nobody says how much was drawn from that generator; found(index): a rounding
    decides how large that leaf is."""
    if type(ours.error) is not type(eager.error) or first_line(ours.error) != first_line(eager.error):
        raise Mismatch(f"{where}: raised {ours.error!r:.300}, eager {eager.error!r:.300}")
    if [p for p, _ in ours.leaves] != [p for p, _ in eager.leaves] or containers(ours.out) != containers(eager.out):
        raise Mismatch(f"{where}: structure {[p for p, _ in ours.leaves]} in {containers(ours.out)}, eager {[p for p, _ in eager.leaves]} in {containers(eager.out)}")
    # Of leaves of which a view is returned; docs/differences.md.
    viewed = {t._base.shape for _, t in tensors_of(eager.out) if t.requires_grad and t._is_view() and t._base.is_leaf}
    for i, ((path, a), (_, b)) in enumerate(zip(ours.leaves, eager.leaves)):
        if eager.error is not None and path.startswith("grad of"):
            continue  # a backward that raises leaves the gradients that it came to first
        place = f"{where}, {path}"
        if not isinstance(b, torch.Tensor) or not isinstance(a, torch.Tensor):
            if type(a) is not type(b) or not (a is b or a == b or (a != a and b != b)):
                raise Mismatch(f"{place}: {a!r:.80}, eager {b!r:.80}")
            continue
        if a.shape != b.shape and found(i):
            raise OfValues(f"{place}: shape {a.shape}, eager {b.shape}")
        anywhere = any(b.shape[max(b.dim() - len(shape), 0):] == shape for shape in viewed)
        check_meta(place, a, b, path.startswith(("grad of", "out[1]")), anywhere, declared)  # what is told beside the results are gradients
        if history(a) != history(b) or a.is_inference() != b.is_inference():
            raise Mismatch(f"{place}: has a grad_fn, is a leaf: {history(a)}, eager {history(b)}; inference {a.is_inference()}, eager {b.is_inference()}")
        check(i, place, a, b)
    for what, a, b in (("aliasing", alias_pattern(ours.out, ours.held), alias_pattern(eager.out, eager.held)), ("versions moved by", ours.bumps, eager.bumps)):
        if a != b:
            raise Mismatch(f"{where}: {what} {a}, eager {b}")
    for i, (what, a, b) in enumerate(zip(("the random state", "the generator"), ours.states, eager.states)):
        if not torch.equal(a, b) and not drawn(i):
            raise Mismatch(f"{where}: {what} differs")


NATIVE = {"add", "mul", "sub", "div", "neg", "abs", "relu", "sigmoid", "tanh", "sin", "cos", "exp", "sqrt", "where", "gelu", "silu", "gt", "lt", "maximum", "minimum", "clamp", "sum", "amax", "mean"}


def native_results(program):
    """Ops of ours that made results with elements in the first call, whatever was done with them: then a kernel has run."""
    watch = Watch()
    outcome = Side(program, around=lambda: watch).make(dataclasses.replace(program.calls[0], driver="out = f(*args)"), 0)
    return {watch.made[storage(t)][0] for p, t in outcome.leaves if p.startswith("out") and isinstance(t, torch.Tensor) and t.numel() and storage(t) in watch.made} & NATIVE


# What the engine leaves to eager, since nobody can promise more: not counted as not compiled, but named and bounded too.
LEFT = re.compile("overlap|shares memory with input|reaches outside its tensor|registers a gradient hook|a reentrant checkpoint")

CAUGHT = "raised what eager does not"


def compiled(fn, dynamic):
    """With room for more signatures than programs usually have."""
    return vitrify.compile(fn, dynamic=dynamic, options={"recompile_limit": 64})


def noted():
    """How often calls have run eagerly, by reason."""
    return _C.eager_reasons()


def check(program, reference) -> dict:
    """How it went: kind ("ok", "library" (nothing but views and calls), "raises", "left" or "eager" with the reason, "inconclusive"). Raises compare.Mismatch."""
    unclear = set()
    eager, ours = Side(program), None
    elementwise = "mixed" if any(op in program.body.source for op in MIXED) or program.training else True
    # Not of half values: one that was not rounded would pass for right.
    decided = not any(half in text for half in ("F16", "half", "float16") for text in (program.body.source, *(call.text for call in program.calls)))
    total, reasons, said, silent, ends, earlier = {}, [], [], [], [], []  # also by calls that raised; calls that ran eagerly; whether eager's raised
    known = noted()

    def value(*where):
        try:
            judge_value(*where)
        except Mismatch as wrong:
            raise OfValues(str(wrong)) from wrong

    def judge_value(call, index, place, a, b):
        if bits_equal(a.detach(), b.detach()):
            return
        for jolts in (0, JOLTS, MANY):
            if not jolts and not reference.near(call, index, b.detach(), reference.wide):
                continue
            reference.move(jolts)
            wide, spread = reference.leaf(call, index, b.detach())
            if spread is None:
                unclear.add(place)
                return
            try:
                return check_value(place, a.detach(), b.detach(), wide, spread, elementwise, decided)
            except Mismatch:
                if jolts == MANY:
                    own = reference.of_its_own(call, index, b.detach())
                    if own is None and program.training and reference.overflows(call, index, a.detach(), b.detach()):
                        unclear.add(place)
                        return
                    if own is None:
                        raise
                    return check_value(place, a.detach(), own, own.to(wide.dtype), [2 * s for s in spread], elementwise, decided)

    def drawn(call, index, eager):
        """Numbers are drawn for what is not positive, say: a rounding may decide how many."""
        if unsure := reference.decides(call, lambda run: run[2][index].tolist(), eager.tolist()):
            unclear.add(f"call {call}, how many numbers are drawn")
        return unsure
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", vitrify.VitrifyWarning)
        ours = Side(program, compiled=compiled)
        for number, call in enumerate(program.calls):
            theirs, told = eager.make(call, number), len(log)
            if theirs.error is not None and "INTERNAL ASSERT FAILED" in str(theirs.error):  # a bug of torch's says nothing about the program
                return {"kind": "inconclusive", "reason": f"call {number}: eager fails within: {first_line(theirs.error):.120}"}
            mine = ours.make(call, number, lambda: vitrify.counters)
            internal = [str(w.message) for w in log if "internal error" in str(w.message) or "a compiled call" in str(w.message)]
            if internal and CAUGHT in internal[0] and reference.decides(number, lambda run: type(run[0]), type(theirs.error)):  # eager has not raised, and might have
                return {"kind": "inconclusive", "reason": f"call {number}: a rounding decides whether it raises"}
            if internal:
                raise InternalError(f"call {number}: {internal[0]}")
            if type(mine.error) is not type(theirs.error) and reference.decides(number, lambda run: type(run[0]), type(theirs.error)):  # as of a matrix without a factor
                return {"kind": "inconclusive", "reason": f"call {number}: a rounding decides whether it raises"}
            same_call(f"call {number}", mine, theirs, lambda i, place, a, b, number=number: value(number, i, place, a, b),
                      lambda i, number=number, theirs=theirs: drawn(number, i, theirs.states[i]),
                      lambda i, number=number, theirs=theirs: reference.decides(number, lambda run: run[1][i][1].shape, theirs.leaves[i][1].shape), "ops.fuzz" in program.body.source)
            earlier.append((held(mine.out), held(theirs.out)))
            new = [str(w.message) for w in log[told:] if issubclass(w.category, vitrify.VitrifyWarning)]
            said += new
            reasons += new if theirs.error is None else []
            ends.append(theirs.error is not None)
            if theirs.error is None and mine.did.get("eager_calls"):
                silent.append(number)
            for k, v in mine.did.items():
                if theirs.error is None or k in ("compiled_calls", "kernels_launched"):
                    total[k] = total.get(k, 0) + v
    if over := [number for number, (mine, theirs) in enumerate(earlier) if changed(mine) != changed(theirs)]:
        raise Mismatch(f"call {over[0]}: later calls have changed what it has given, or not as eager's have")
    if unclear:
        return {"kind": "inconclusive", "reason": sorted(unclear)[0]}
    if all(ends):
        return {"kind": "raises"}
    if not total.get("compiled_calls") and not total.get("eager_calls") and not reasons:
        return {"kind": "eager", "reason": "nothing was compiled, and nobody counted what ran"}
    if reasons or total.get("eager_calls") or total.get("fallbacks"):
        # Each is said once; why a single call went another way is only noted.
        told = reasons or (said or [why for why, times in noted().items() if times > known.get(why, 0)] if silent else [])
        reason = told[0] if told else f"without a reason, in call {silent[0]}" if silent else "gradients are computed op by op"
        return {"kind": "left" if LEFT.search(reason) else "eager", "reason": reason}
    if not total.get("kernels_launched"):
        native = native_results(program)
        return {"kind": "eager", "reason": f"no native kernel, though a result is made by {sorted(native)[0]}"} if native else {"kind": "library"}
    return {"kind": "ok"}
