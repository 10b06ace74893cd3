"""Arguments of a random program: what each looks like (Spec, which prints the code that makes it), and other signatures of the same program."""
from __future__ import annotations

import dataclasses
import math

import torch
from compare import steps

NARROW = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16, "C64": torch.complex64, "C128": torch.complex128}
WHOLE = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
DTYPES = NARROW | WHOLE
WIDE = {name: torch.complex128 if dtype.is_complex else torch.float64 for name, dtype in NARROW.items()} | WHOLE
SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-38, 1e-41, 0.5]
EXTREME = [65504.0, -65504.0, 1e38, -3.4e38, 3.4e38, 1e-45, 1.7e308, 2.0 ** 31, 2.0 ** 63, 16777217.0]  # sums of these overflow or not by their order: for elementwise programs


@dataclasses.dataclass(frozen=True)
class Spec:
    """One argument. `view`: it is this expression of an earlier argument instead of memory of its own."""
    shape: tuple[int, ...]
    dtype: str = "F32"
    layout: str = "contiguous"
    seed: int = 0
    special: str = ""       # "special" or "extreme": a few such values
    grad: bool = False
    below: int = 0   # integers: indices below this
    view: str = ""

    @property
    def text(self):
        if self.view:
            return self.view
        more = "".join(f", {k}={v!r}" for k, v in (("layout", self.layout), ("special", self.special), ("grad", self.grad), ("below", self.below))
                       if v not in ("contiguous", "", False, 0))
        return f"values({self.seed}, {self.shape}, {self.dtype!r}{more})"


def seed(number):
    """torch.manual_seed without the devices that there are none of."""
    torch.default_generator.manual_seed(number)


class Values:
    """values(seed, shape, dtype, ...): the tensor of a Spec. wide: the same in double precision. jolt: a seed; moved by a unit in the last place."""

    def __init__(self, wide=False, jolt=0):
        self.wide, self.jolt = wide, jolt

    def __call__(self, seed, shape, dtype, layout="contiguous", special="", grad=False, below=0):
        rng = torch.Generator().manual_seed(seed)

        def fill(shape):
            t = draw(rng, shape, dtype, special, below)
            if self.jolt and dtype in ("F32", "F64", "C64", "C128"):
                t = t * steps(t, 7919 * self.jolt + seed)
            return t.to(WIDE[dtype]) if self.wide else t
        t = LAYOUTS[layout](fill, shape)
        assert tuple(t.shape) == tuple(shape)
        return t.requires_grad_() if grad else t


def draw(rng, shape, dtype, special, below):
    kind = DTYPES[dtype]
    if kind is torch.bool:
        return torch.rand(shape, generator=rng) > 0.5
    if not (kind.is_floating_point or kind.is_complex):
        low, high = (0, below) if below else (0, 14) if kind is torch.uint8 else (-5, 9)
        t = torch.randint(low, high, shape, generator=rng, dtype=kind)
        odd = [torch.iinfo(kind).min, torch.iinfo(kind).max, 0] if not below else []
    else:
        t = torch.randn(shape, generator=rng, dtype=torch.complex128 if kind.is_complex else torch.float64).to(kind)
        odd = EXTREME if special == "extreme" else SPECIAL
    if special and odd and t.numel():
        for place in torch.randint(0, t.numel(), (3,), generator=rng).tolist():
            t.view(-1)[place] = torch.tensor(odd[int(torch.randint(0, len(odd), (), generator=rng))], dtype=torch.float64 if kind.is_floating_point or kind.is_complex else kind).to(kind)
    return t


def permuted(order):
    def make(fill, shape):
        order_here = order(len(shape))
        return fill([shape[i] for i in order_here]).permute([order_here.index(i) for i in range(len(shape))])
    return make


def sliced(fill, shape):
    return fill([*shape[:-1], 2 * shape[-1] + 1])[..., 1::2] if shape else fill(shape)


def offset(fill, shape):
    n = math.prod(shape)
    return fill([n + 5])[3:3 + n].view(shape)


def expanded(fill, shape):
    return fill([1, *shape[1:]]).expand(shape) if shape else fill(shape)


def channels_last(fill, shape):
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    return fill(shape).contiguous(memory_format=form) if form else fill(shape)


def windows(fill, shape):
    """Overlapping: each row is the one before moved by one element."""
    if len(shape) < 2 or not math.prod(shape):
        return fill(shape)
    t = fill([*shape[:-2], shape[-2] + shape[-1] - 1])
    return t.unfold(-1, shape[-1], 1)


def negative(fill, shape):
    """With the negative bit, or for complex numbers the conjugate's."""
    t = fill(shape)
    if t.is_complex():
        return t.conj()
    return torch.complex(t, t).conj().imag if t.dtype in (torch.float32, torch.float64) else t


LAYOUTS = {"contiguous": lambda fill, shape: fill(shape), "permuted": permuted(lambda n: list(range(n))[::-1]), "swapped": permuted(lambda n: [*range(n - 2), n - 1, n - 2] if n > 1 else [0] * n),
           "sliced": sliced, "offset": offset, "expanded": expanded, "channels_last": channels_last, "windows": windows, "negative": negative}
SHARED = {"permuted", "swapped", "sliced", "offset", "channels_last"}  # no element twice: may be written to
VIEWS = ["{x}", "{x}.detach()", "{x}[1:]", "{x}[:-1]", "{x}.mT", "{x}.view({x}.shape)", "{x}[..., ::2]", "{x}.unsqueeze(0)", "{x}.expand(2, *{x}.shape)", "{x}.reshape(-1)", "{x}.select(0, 0)"]


def some_layout(choose, spec, writes=True):
    """Often contiguous, as arguments are."""
    if not spec.shape or choose.random() < 0.6:
        return "contiguous"
    names = sorted(SHARED if writes else set(LAYOUTS) - {"contiguous"})
    return choose.choice(names)


# ---- other signatures

def other_sizes(choose, specs):
    """One size becomes another, wherever it occurs: what broadcast still does."""
    sizes = sorted({n for s in specs for n in s.shape if n > 1})
    if not sizes:
        return specs
    old = choose.choice(sizes)
    new = choose.choice([n for n in (1, 2, 3, 4, 5, 6, 8, 12, old + 1, 2 * old) if n != old])
    return [dataclasses.replace(s, shape=tuple(new if n == old else n for n in s.shape)) for s in specs]


def other_dtype(choose, specs):
    old = choose.choice(sorted({s.dtype for s in specs if not s.below}) or ["F32"])
    family = ["F32", "F64", "BF16", "F16"] if old in ("F32", "F64", "BF16", "F16") else ["C64", "C128"] if old.startswith("C") else ["I64", "I32", "I16", "U8", "I8"]
    new = choose.choice([d for d in family if d != old])
    return [dataclasses.replace(s, dtype=new) if s.dtype == old and not s.below else s for s in specs]


def other_layout(choose, specs):
    at = choose.randrange(len(specs))
    return [dataclasses.replace(s, layout=choose.choice(sorted(set(LAYOUTS) - {s.layout}))) if i == at else s for i, s in enumerate(specs)]


def other_values(choose, specs):
    return [dataclasses.replace(s, seed=s.seed + 1000, special=choose.choice(["special", "", ""])) for s in specs]


def shared(choose, specs):
    """One argument becomes a view of an earlier one of its dtype. Not of one that is negated lazily: once that is written, autograd has an internal error."""
    pairs = [(i, j) for j in range(len(specs)) for i in range(j)
             if specs[i].dtype == specs[j].dtype and not specs[j].below and specs[i].shape and not specs[i].view and specs[i].layout != "negative"]
    if not pairs:
        return specs
    i, j = choose.choice(pairs)
    view = choose.choice(VIEWS[:2] if choose.random() < 0.6 and specs[i].shape == specs[j].shape else VIEWS)
    return [dataclasses.replace(s, view=view.format(x=f"x{i}")) if n == j else s for n, s in enumerate(specs)]


OTHERS = {"sizes": other_sizes, "dtype": other_dtype, "layout": other_layout, "values": other_values, "shared": shared}
