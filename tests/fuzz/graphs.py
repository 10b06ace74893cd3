"""Random programs, compiled beside eager: shapes, strides, dtypes, special values, views, in-place writes, several results.

graphs.py [--n N] [--seed S] [--length L] [--print]    a failure prints its seed and its program; --seed S --n 1 runs it again
"""
from __future__ import annotations

import argparse
import linecache
import random
import sys
import time
import warnings
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
sys.path.append(str(HERE.parent.parent))  # after PYTHONPATH, which may name a package built for another torch

SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-38, 1e38, 0.5]
FLOAT, INT, BOOL = "F32", "torch.int64", "torch.bool"

UNARY = ["torch.abs({a})", "-{a}", "torch.relu({a})", "torch.tanh({a})", "torch.sigmoid({a})", "torch.sin({a})", "torch.exp(-torch.abs({a}))", "torch.log1p(torch.abs({a}))",
         "torch.sqrt(torch.abs({a}) + 1)", "torch.erf({a})", "torch.nn.functional.gelu({a})", "torch.nn.functional.silu({a})", "torch.floor({a})", "torch.sign({a})",
         "torch.clamp({a}, -1, 2)", "{a} * 2", "{a} + 1", "1.5 - {a}", "{a} / 3", "{a} ** 2", "torch.nan_to_num({a})", "torch.isnan({a})", "{a}.to(F32)", "{a}.to(F64)", "{a} > 0",
         "torch.reciprocal(torch.abs({a}) + 1)", "torch.rsqrt(torch.abs({a}) + 0.5)", "{a}.clone()", "torch.zeros_like({a})", "torch.tril({a})", "torch.triu({a}, 1)"]
BINARY = ["{a} + {b}", "{a} - {b}", "{a} * {b}", "{a} / (torch.abs({b}) + 1)", "torch.maximum({a}, {b})", "torch.minimum({a}, {b})", "{a} < {b}", "{a} == {b}",
          "torch.where({a} > {b}, {a}, {b})", "torch.where({b} > 0, {a}, 0)", "torch.lerp({a}, {b}, 0.25)", "torch.atan2({a}, {b})", "torch.addcmul({a}, {b}, {b})", "torch.hypot({a}, {b})",
          "torch.fmod({a}, torch.abs({b}) + 1)", "torch.matmul({a}, {b})", "torch.matmul({a}, {b}.mT)"]
DIM = ["{a}.sum({d})", "{a}.sum({d}, keepdim=True)", "{a}.mean({d})", "{a}.amax({d})", "{a}.amin({d}, keepdim=True)", "{a}.argmax({d})", "torch.softmax({a}, {d})", "torch.log_softmax({a}, {d})",
       "torch.cumsum({a}, {d})", "{a}.var({d})", "{a}.std({d}, keepdim=True)", "torch.any({a}, {d})", "{a}.prod({d})", "torch.logsumexp({a}, {d})", "{a} - {a}.mean({d}, keepdim=True)",
       "torch.nn.functional.layer_norm({a}, {a}.shape[-1:])", "{a}.sum()", "{a}.max()", "{a}.flip({d})", "torch.roll({a}, 1, {d})"]
VIEW = ["{a}.transpose({d}, {e})", "{a}.unsqueeze({d})", "{a}.squeeze({d})", "{a}.reshape(-1)", "{a}.flatten({d})", "{a}.mT", "{a}.narrow({d}, 0, 1)", "{a}.select({d}, 0)", "{a}[1:]", "{a}[..., ::2]",
        "{a}[:, :-1]", "{a}.expand(2, *{a}.shape)", "{a}.contiguous()", "{a}.unflatten({d}, (-1, 2))", "{a}.diagonal()", "{a}.movedim({d}, {e})", "{a}.view({a}.shape)", "{a}.detach()"]
INPLACE = ["{a}.add_({b})", "{a}.mul_(2)", "{a}.relu_()", "{a}.copy_({b})", "{a}.fill_(0.5)", "{a}.zero_()", "{a}.masked_fill_({a} > 0, 1)", "{a}.clamp_(-1, 1)", "{a}[0] = {b}", "{a}[..., 0] = 3",
           "{a}[{a} > 1] = 0", "{a}.sub_({b})", "{a} += {b}", "{a}.t_()", "{a}.transpose_({d}, {e})", "{a}.exp_()", "{a}.neg_()"]
MANY = ["torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {b}], {d})", "torch.index_select({a}, {d}, index)", "{a}[index]", "torch.gather({a}, {d}, torch.zeros_like({a}, dtype=torch.int64))",
        "torch.nn.functional.pad({a}, (1, 2))", "torch.zeros_like({a}).index_add({d}, index, torch.index_select({a}, {d}, index))", "{a}.chunk(2, {d})[0]", "torch.split({a}, 1, {d})[-1]",
        "{a}.topk(1, {d}).values", "torch.sort({a}, {d}).values", "torch.einsum('...i,...i->...', {a}, {b})", "{a}.repeat_interleave(2, {d})", "torch.arange({a}.shape[{d}]) + 0 * {a}.sum()"]

# What gives its operands' values, or values that no rounding touches. All else rounds.
EXACT = {*VIEW, *INPLACE, *MANY, "torch.abs({a})", "-{a}", "torch.relu({a})", "torch.floor({a})", "torch.sign({a})", "torch.clamp({a}, -1, 2)", "{a} * 2", "torch.nan_to_num({a})",
         "torch.isnan({a})", "{a}.to(F32)", "{a}.to(F64)", "{a} > 0", "{a}.clone()", "torch.zeros_like({a})", "torch.tril({a})", "torch.triu({a}, 1)", "torch.maximum({a}, {b})",
         "torch.minimum({a}, {b})", "{a} < {b}", "{a} == {b}", "torch.where({a} > {b}, {a}, {b})", "torch.where({b} > 0, {a}, 0)", "{a}.amax({d})", "{a}.amin({d}, keepdim=True)",
         "{a}.argmax({d})", "torch.any({a}, {d})", "{a}.max()", "{a}.flip({d})", "torch.roll({a}, 1, {d})"}
EXACT -= {"{a}.add_({b})", "{a}.sub_({b})", "{a} += {b}", "{a}.exp_()", MANY[6], MANY[11]}
INNER = {"{a} - {a}.mean({d}, keepdim=True)": "{a} - moved({a}.mean({d}, keepdim=True))", "torch.fmod({a}, torch.abs({b}) + 1)": "torch.fmod({a}, moved(torch.abs({b}) + 1))"}  # two roundings
CONVERTS = {"{a}.to(F32)": "a", "{a}.copy_({b})": "b", "{a}[0] = {b}": "b"}  # these round an f64 operand


def overlap(written, read):
    """They share memory, and not as one and the same tensor."""
    def extent(t):
        return t.data_ptr(), t.data_ptr() + t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())))
    if not written.numel() or not read.numel() or (written.data_ptr() == read.data_ptr() and written.shape == read.shape and written.stride() == read.stride()):
        return False
    (a, b), (c, d) = extent(written), extent(read)
    return a < d and c < b


class Program:
    """A function as text, grown line by line on real values so that every line is one that eager accepts."""

    def __init__(self, seed: int, length: int):
        self.random = random.Random(seed)
        self.seed = seed
        torch.manual_seed(seed)
        self.inputs = [self.tensor() for _ in range(self.random.randint(1, 4))]
        rows = min([t.shape[0] for t in self.inputs if t.dim() and t.shape[0]] or [1])
        self.index = torch.randint(0, rows, (self.random.choice([1, 2, 5]),))
        self.lines: list[str] = []
        self.rounded: dict[str, str] = {}  # line: the name of what it rounds
        self.inner: dict[str, str] = {}    # line: the same with its first rounding marked
        self.grow(length)

    def tensor(self):
        choose = self.random
        base = [choose.choice([1, 2, 3, 4, 7, 8, 16, 33]) for _ in range(choose.randint(0, 4))]
        if getattr(self, "base", None) is not None and choose.random() < 0.75:  # mostly shapes that broadcast with the first one's
            base = [d if choose.random() < 0.8 else 1 for d in self.base][choose.randint(0, 1) if len(self.base) > 1 else 0:]
        else:
            if choose.random() < 0.03 and base:
                base[choose.randrange(len(base))] = 0
            self.base = base
        kind = choose.choices([FLOAT, "F64", "torch.bfloat16", "torch.int32", INT, BOOL], [12, 1, 1, 1, 2, 1])[0]
        dtype = {FLOAT: torch.float32, "F64": torch.float64, "torch.bfloat16": torch.bfloat16, "torch.int32": torch.int32, INT: torch.int64, BOOL: torch.bool}[kind]

        def fill(shape):
            if dtype is torch.bool:
                return torch.rand(shape) > 0.5
            if not dtype.is_floating_point:
                return torch.randint(-5, 9, shape, dtype=dtype)
            t = torch.randn(shape, dtype=dtype)
            if choose.random() < 0.15 and t.numel():
                flat = t.view(-1)
                for _ in range(choose.randint(1, 4)):
                    flat[choose.randrange(t.numel())] = choose.choice(SPECIAL)
            return t
        layout = choose.random()
        if base and layout < 0.15:
            order = list(range(len(base)))
            choose.shuffle(order)
            inverse = [order.index(i) for i in range(len(base))]
            return fill([base[i] for i in order]).permute(inverse)
        if base and layout < 0.25:
            wide = list(base)
            wide[-1] = 2 * wide[-1] + 1
            return fill(wide)[..., 1:2 * base[-1]:2] if base[-1] else fill(base)
        if base and layout < 0.30:
            return fill([1, *base[1:]]).expand(base)
        return fill(base)

    def grow(self, length):
        values = {f"x{i}": t.clone(memory_format=torch.preserve_format) for i, t in enumerate(self.copies())}
        scope = {"torch": torch, "F32": torch.float32, "F64": torch.float64, "index": self.index, **values}
        names, tries = list(values), 0
        while len(self.lines) < length and tries < 12 * length:
            tries += 1
            group = self.random.choices([UNARY, BINARY, DIM, VIEW, INPLACE, MANY], [5, 6, 4, 4, 2, 2])[0]
            recent = names[-4:] if self.random.random() < 0.7 else names
            a, b = self.random.choice(recent), self.random.choice(names)
            rank = max(1, scope[a].dim())
            template = self.random.choice(group)
            places = {"a": a, "b": b, "d": self.random.randrange(-rank, rank), "e": self.random.randrange(-rank, rank)}
            text = template.format(**places)
            new = f"v{len(self.lines)}"
            line = text if group is INPLACE else f"{new} = {text}"
            if group is INPLACE and "{b}" in template and overlap(scope[a][:1] if "[0]" in template and scope[a].dim() else scope[a], scope[b]):
                continue  # what such a write reads depends on the order of eager's loop: torch promises nothing
            rounds = template not in EXACT or (template in CONVERTS and scope[{"a": a, "b": b}[CONVERTS[template]]].dtype is torch.float64)
            saved = {n: scope[n].clone() for n in names} if group is INPLACE else None
            try:
                exec(line, scope)
                made = scope[a] if group is INPLACE else scope[new]
                good = isinstance(made, torch.Tensor) and made.numel() <= 1 << 16 and made.dim() <= 6
            except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
                good = False
            if not good:
                scope.pop(new, None)
                if saved is not None and any(not torch.equal(saved[n].isnan(), scope[n].isnan()) or not torch.equal(saved[n].nan_to_num(), scope[n].nan_to_num())
                                             if saved[n].shape == scope[n].shape else True for n in names):
                    break  # a write that failed half way: end here, the values are no longer those of the program
                continue
            self.lines.append(line)
            if rounds:
                self.rounded[line] = a if group is INPLACE else new
                if template in INNER:
                    self.inner[line] = f"{new} = {INNER[template].format(**places)}"
            if group is not INPLACE:
                names.append(new)
        made = [n for n in names if n.startswith("v")]
        results = sorted(set(self.random.sample(made, min(len(made), 3)) + made[-1:])) or names[:1]
        if self.random.random() < 0.2:
            results.append(self.random.choice(names))
        if self.random.random() < 0.2 and len(self.lines) > 3:  # control flow on a shape, which a capture must guard
            self.lines.insert(self.random.randrange(len(self.lines)), "if x0.dim() > 1 and x0.shape[0] > 3:\n        x0 = x0 + 0")
        self.results = results

    def copies(self):
        from compare import copied
        return copied(tuple(self.inputs))

    @property
    def source(self):
        return self.text(self.lines)

    def text(self, lines):
        arguments = ", ".join(f"x{i}" for i in range(len(self.inputs)))
        body = "\n".join("    " + line for line in lines)
        return f"def program({arguments}, index):\n{body}\n    return {', '.join(self.results)},\n"

    def function(self, wide=False, jolts=0):
        """`jolts`: a seed; what each line rounds is moved by a unit in the last place."""
        def move(made, seed):
            from compare import steps
            if made.is_floating_point():
                made.data.mul_(steps(made, seed))  # no write that autograd would see
            return made
        scope = {"torch": torch, "F32": torch.float64 if wide else torch.float32, "F64": torch.float64, "move": move, "moved": lambda made: move(made, 1000 * jolts + 999)}
        name = f"<fuzz {self.seed}{' wide' if wide else ''}>"
        source = self.source
        if jolts:
            source = self.text([f"{self.inner.get(line, line)}; move({self.rounded[line]}, {1000 * jolts + i})" if line in self.rounded else line for i, line in enumerate(self.lines)])
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        exec(compile(source, name, "exec"), scope)
        return scope["program"]

    @property
    def sample(self):
        return (*self.inputs, self.index)

    def describe(self):
        inputs = "\n".join(f"# x{i}: {t.dtype} {tuple(t.shape)} strides {t.stride()}" for i, t in enumerate(self.inputs))
        return f"# seed {self.seed}\n{inputs}\n{self.source}"


def reference_of(program):
    """The fp64 leaves, with how far eager's move when its float inputs, and what its lines round, move by a unit in the last place: any correct implementation of
    an op may differ by that, and what a program makes of it is the program's conditioning. A leaf of no meaning in eager (its integers or infinities change, or
    1 % of it, or four units) has None."""
    from compare import attempt, attempt_wide, copied, distances, flat, move_inputs, widen

    def leaves(fn, given, attempt=attempt):
        out, problem = attempt(fn, *given)
        return None if problem else [v for _, v in flat(out)] + [v for _, v in flat(given, "in")]

    def jolted(sample, seed):
        given = copied(sample)
        move_inputs(given, seed)
        return leaves(program.function(jolts=seed), given)

    def moved_by(plain, runs, wide):
        if not isinstance(plain, torch.Tensor):
            return 0.0, 0.0
        spread = [0.0, 0.0]
        for other in runs:
            if plain.shape != other.shape or plain.shape != wide.shape:
                return None
            if not plain.is_floating_point():
                if not torch.equal(plain, other) or not torch.equal(plain, wide.to(plain.dtype)):
                    return None
                continue
            keep = plain.isfinite()
            if not torch.equal(keep, other.isfinite()) or not torch.equal(keep, wide.isfinite()):
                return None
            spread = [max(p) for p in zip(spread, distances(other[keep].double(), plain[keep].double(), plain.dtype))]
        return None if spread[0] > max(1e-2, 4 * (torch.finfo(plain.dtype).eps if plain.is_floating_point() else 0)) else tuple(spread)

    def run(fn, sample, count):
        plain = leaves(fn, copied(sample))
        wide = leaves(program.function(wide=True), list(widen(copied(sample))), attempt_wide)
        runs = [jolted(sample, seed) for seed in range(1, 9)]
        if any(r is None or len(r) != count for r in (plain, wide, *runs)):
            return [(None, None)] * count
        return [(w, moved_by(p, moved, w)) for p, w, *moved in zip(plain, wide, *runs)]
    return run


def check(program) -> str:
    """"ok", "inconclusive" or "eager" (it was not compiled: nothing was compared); raises compare.Mismatch."""
    import vitrify
    from compare import compare
    try:
        mixed = any(op in program.source for op in ("_norm(", "softmax(", "logsumexp(", ".mean(", ".var(", ".std("))
        did = compare(program.function(), program.sample, reference_run=reference_of(program), elementwise="mixed" if mixed else True)
        return "inconclusive" if did["unclear"] else "eager" if did.get("fallbacks") or did.get("eager_calls") else "ok"
    finally:
        vitrify.reset()


def run_programs(check, make, kinds, argv, **about):
    """A command line: checks make(seed, length) for the seeds it asks for, counts how they went, and prints those that differ."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, **about)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=12, help="lines of a program, at most")
    parser.add_argument("--print", action="store_true", help="print every program")
    args = parser.parse_args(argv)
    from compare import Mismatch, internal_errors_raise
    warnings.simplefilter("ignore")
    internal_errors_raise()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    count, start = dict.fromkeys((*kinds, "failed"), 0), time.time()
    for seed in range(args.seed, args.seed + args.n):
        program = make(seed, 1 + seed % args.length)
        if args.print:
            print(program.describe(), flush=True)
        try:
            count[check(program)] += 1
        except Mismatch as wrong:
            count["failed"] += 1
            print(f"seed {seed}: {wrong}\n{program.describe()}", flush=True)
        if (seed - args.seed + 1) % 100 == 0:
            print(f"{seed - args.seed + 1} of {args.n} programs, seeds from {args.seed}: {count}", flush=True)
    print(f"{args.n} programs from seed {args.seed}: {', '.join(f'{n} {kinds.get(k, k)}' for k, n in count.items())} ({time.time() - start:.0f} s)")
    return 1 if count["failed"] else 0


KINDS = {"ok": "as eager", "inconclusive": "inconclusive", "eager": "not compiled"}


def main(argv=None):
    with torch.no_grad():
        return run_programs(check, Program, KINDS, argv, prog="./x fuzz", description=__doc__)


if __name__ == "__main__":
    raise SystemExit(main())
