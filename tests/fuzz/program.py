"""A random program: a function or a module as text, grown line by line on real values so that every line is one that eager accepts, and the calls that are made of it."""
from __future__ import annotations

import copy
import dataclasses
import random
import re

import families
import gradients_of
import layers
import scope as scopes
import torch
import values
from calls import argument, some_calls
from values import Spec

FAMILIES = families.FAMILIES | layers.FAMILIES | gradients_of.FAMILIES
MOST = 1 << 16          # elements of a value
TRIES = 14              # for each line


# What eager says where memory is bounded, and a larger machine would have it.
MUCH = re.compile("allocate memory|bad_alloc")
# What eager says of a gradient that is asked for too late, twice, or of what has none.
MEANT = re.compile("second time|modified by an inplace|appears to not have been used|leaf Variable")


@dataclasses.dataclass(frozen=True)
class Theme:
    """What a program is mostly made of: weights of families, shapes of its arguments, their dtypes."""
    weights: dict[str, float]
    shapes: tuple[tuple[int, ...], ...] = ()  # none: random ones
    dtypes: tuple[str, ...] = ("F32",) * 12 + ("F64", "BF16", "I32", "I64", "I64", "BOOL")
    module: float = 0.3
    special: str = "special"
    most: int = MOST


COMMON = {"elementwise": 5, "binary": 5, "reduce": 3, "view": 3, "many": 2, "write": 2, "number": 1, "item": 0.3}
FLOATS, HALVES = ("F32",), ("F16", "F16", "BF16", "F32")
IMAGES = ((2, 4, 6, 6), (1, 4, 8, 8), (2, 8, 5, 7), (3, 4, 1, 1), (1, 16, 12, 12), (2, 3, 9), (1, 4, 4, 4, 4))
SEQUENCES = ((2, 5, 8), (1, 2, 6, 8), (3, 4, 4, 16), (7, 16), (2, 9, 32))
THEMES = {
    "mixed": Theme(COMMON | {"product": 2, "strided": 0.5, "window": 0.5, "out": 0.3, "foreach": 0.3, "mask": 0.3, "random": 0.3}),
    "classic": Theme(COMMON | {"product": 2, "number": 0, "item": 0}, module=0),
    "images": Theme({"convolution": 5, "pooling": 3, "norm": 2, "elementwise": 3, "binary": 2, "view": 1, "reduce": 1, "strided": 0.7, "state": 0.3, "attention": 0.7, "random": 0.3}, IMAGES, FLOATS, 0.95),
    "chains": Theme({"chain": 6, "convolution": 2, "pooling": 2, "norm": 1, "elementwise": 2, "binary": 1, "attention": 0.4}, IMAGES[:5], FLOATS, 1.0),
    "sequences": Theme({"attention": 3, "linear": 4, "norm": 2, "elementwise": 3, "binary": 2, "view": 2, "embedding": 1, "recurrent": 0.4, "product": 1, "loss": 0.7}, SEQUENCES, FLOATS, 0.9),
    "states": Theme({"state": 4, "norm": 3, "linear": 2, "elementwise": 3, "binary": 2, "reduce": 1, "random": 0.5}, SEQUENCES + IMAGES[:3], FLOATS, 1.0),
    "views": Theme({"window": 5, "view": 5, "strided": 3, "elementwise": 2, "binary": 1, "write": 2, "bits": 1, "many": 1}, module=0),
    "writes": Theme({"write": 6, "view": 3, "out": 2, "foreach": 1, "elementwise": 2, "binary": 2, "custom": 0.7}, module=0.1),
    "whole": Theme({"whole": 6, "reduce": 2, "view": 2, "many": 2, "write": 1, "binary": 2, "mask": 1}, (), ("I64", "I32", "I16", "I8", "U8", "BOOL"), 0),
    "complex": Theme({"complex": 6, "fourier": 3, "view": 2, "elementwise": 1, "binary": 2, "reduce": 1, "write": 1}, (), ("C64", "C64", "C128", "F32"), 0),
    "halves": Theme(COMMON | {"product": 2, "norm": 1, "mask": 0.3}, (), HALVES, 0.1),
    "random": Theme({"random": 5, "elementwise": 3, "binary": 2, "view": 2, "reduce": 1, "write": 1, "mask": 0.5}, (), ("F32", "F32", "F64", "BF16"), 0.2),
    "masks": Theme({"mask": 5, "elementwise": 3, "binary": 1, "reduce": 2, "view": 1, "custom": 1, "many": 1}, (), ("F32", "F32", "I64", "BOOL"), 0),
    "linalg": Theme({"linalg": 5, "product": 2, "elementwise": 2, "binary": 1, "view": 1}, ((3, 3), (2, 4, 4), (4, 3), (2, 2, 5, 5)), ("F32", "F64"), 0),
    "extremes": Theme({"elementwise": 6, "binary": 5, "view": 2, "write": 2}, (), ("F32", "F32", "F16", "BF16", "F64", "I32", "I64", "U8"), 0, "extreme"),
    "errors": Theme(COMMON | {"write": 4}),
    "autocast": Theme({"autocast": 5, "linear": 2, "elementwise": 3, "binary": 2, "view": 1, "reduce": 1}, SEQUENCES + IMAGES[:2], FLOATS, 0.7),
    "large": Theme({"elementwise": 5, "binary": 4, "reduce": 4, "view": 2, "many": 1, "write": 1}, ((130, 1030), (70000,), (3, 300, 257), (64, 40, 100)), ("F32", "F32", "F32", "I64", "BF16"), 0, most=1 << 20),
    "losses": Theme({"loss": 5, "linear": 1, "elementwise": 3, "binary": 2, "reduce": 1}, ((4, 5), (3, 6), (2, 5, 4)), FLOATS, 0.2),
}


def overlap(written, read):
    """They share memory, and not as one and the same tensor: what such a write reads depends on the order of eager's loop, torch promises nothing."""
    def extent(t):
        return t.data_ptr(), t.data_ptr() + t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())))
    if not written.numel() or not read.numel() or (written.data_ptr() == read.data_ptr() and written.shape == read.shape and written.stride() == read.stride()):
        return False
    (a, b), (c, d) = extent(written), extent(read)
    return a < d and c < b


class Body:
    """The text of the function or module: what it owns (name, code), its lines, its results."""

    def __init__(self, arguments, module):
        self.arguments, self.module = arguments, module
        self.owned: list[tuple[str, str]] = []
        self.lines: list[str] = []
        self.results: list[str] = []
        self.form = "({})"

    def without(self, dropped):
        """Without some of its lines, results and layers, all numbered in this order."""
        other, kept = Body(self.arguments, self.module), iter(range(len(self.lines) + len(self.results)))
        other.form = self.form
        other.lines = [line for line in self.lines if next(kept) not in dropped]
        other.results = [r for r in self.results if next(kept) not in dropped]
        other.owned = [(name, code) for name, code in self.owned if any(name in line for line in other.lines)]
        return other

    def named(self, result):
        return f"{result!r}: {result}" if self.form == "{{{}}}" else result

    @property
    def source(self):
        arguments = ", ".join([*(["self"] if self.module else []), *self.arguments])
        indent = " " * (8 if self.module else 4)
        body = "".join(f"{indent}{line}\n" for line in self.lines) + f"{indent}return {self.form.format(', '.join(self.named(r) for r in self.results) + (',' if self.form == '({})' and self.results else ''))}\n"
        if not self.module:
            return f"def program({arguments}):\n{body}"
        owned = "".join(f"        {code}\n" for _, code in self.owned)
        return f"class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n{owned}    def forward({arguments}):\n{body}"


class Grower:
    """Adds lines to a body. All values are those of one run on `specs`."""

    def __init__(self, choose: random.Random, theme: Theme, specs: list[Spec], grad: bool, ):
        self.choose, self.theme, self.specs, self.grad = choose, theme, specs, grad
        module = choose.random() < theme.module
        self.names = [f"x{i}" for i in range(len(specs) - 1)]
        self.body = Body([*self.names, "index", "scale"], module)
        weights = theme.weights | ({"traced": 2, "checkpointed": 1, "hooked": 0.03, "item": 0} if grad else {})
        self.families, self.weights = list(weights), list(weights.values())
        self.recent: list[str] = list(self.names)
        if grad:  # eager refuses to write to a leaf, but not to a copy
            self.body.lines += [f"{n} = {n}.clone()" for n in self.names if choose.random() < 0.5]
        self.restart()

    def restart(self):
        """The values after the lines so far, computed anew: a write may have failed half way."""
        self.scope = scopes.names(wide=False)
        for name, spec in zip(self.body.arguments, self.specs):
            self.scope[name] = argument(spec, self.scope)
        self.scope |= {"self": torch.nn.Module(), "scale": 2.0}
        with torch.set_grad_enabled(self.grad):
            for _, code in self.body.owned:
                values.seed(3)
                exec(code, self.scope)
            for i, line in enumerate(self.body.lines):
                values.seed(3)
                try:
                    exec(line, self.scope)
                except Exception:  # it follows from other random numbers than before: a size, an index
                    del self.body.lines[i:]
                    return

    def values(self):
        return {n: self.scope[n] for n in self.recent if isinstance(self.scope.get(n), torch.Tensor)}

    def grow(self, length):
        tries = 0
        while len(self.body.lines) < length and tries < TRIES * length:
            tries += 1
            self.add()
        return self

    def add(self):
        choose = self.choose
        family = choose.choices(self.families, self.weights)[0]
        templates, wants = FAMILIES[family]
        template = choose.choice(templates)
        layer, template = template if isinstance(template, tuple) else (None, template)
        if layer and not self.body.module:
            return
        known = self.values()
        fitting = [n for n in known if wants(known[n])]
        fitting = [n for n in fitting if n in self.recent[-5:]] or fitting if choose.random() < 0.7 else fitting
        if not fitting:
            return
        a = choose.choice(fitting)
        alike = [n for n in known if known[n].dtype is known[a].dtype]
        b, c = (choose.choice(alike if choose.random() < 0.8 else list(known)) for _ in range(2))
        new, owned = f"v{len(self.body.lines)}", f"m{len(self.body.owned)}"
        t = known[a]
        dims = max(1, t.dim())
        size = t.shape[-1] if t.dim() else 1
        places = {"a": a, "b": b, "c": c, "d": choose.randrange(-dims, dims), "e": choose.randrange(-dims, dims), "v": new, "m": f"self.{owned}",
                  "n": size if layer or choose.random() < 0.5 or not t.dim() else f"{a}.shape[-1]", "C": t.shape[1] if t.dim() > 1 else size}
        line = template.format(**places)
        makes = not (family in families.WRITES and "{v}" not in template and ("_(" in template or "] = " in template or "+=" in template or "out=" in template))
        if makes and "{v}" not in template:
            line = f"{new} = {line}"
        if not makes and choose.random() < 0.85 and any(f"{{{k}}}" in template and overlap(t.data[:1] if "[0]" in template and t.dim() else t, self.scope[places[k]]) for k in "bc"):
            return
        code = None
        if layer:
            made = layer.format(**places)
            code = f"self.register_buffer(\"{owned}\", {made})" if family in layers.BUFFERS else f"self.{owned} = {made}"
        self.attempt(line, new if makes else None, a, code, owned)

    def attempt(self, line, new, written, code, owned):
        try:
            with torch.set_grad_enabled(self.grad), scopes.bounded():
                if code:
                    values.seed(3)
                    exec(code, self.scope)
                exec(line, self.scope)
            made = self.scope[new or written]
            good = isinstance(made, torch.Tensor) and made.numel() <= self.theme.most and made.dim() <= 6 and made.layout is torch.strided
        except Exception:  # whatever the libraries raise: that line is not one of the program
            good = False
        if not good:
            self.restart()
            return
        if code:
            self.body.owned.append((f"self.{owned}", code))
        self.body.lines.append(line)
        if new:
            self.recent.append(new)

    def raise_somewhere(self):
        """A line that raises, mostly only when it runs."""
        at = self.choose.randint(0, len(self.body.lines))
        known = [f"x{i}" for i in range(len(self.specs) - 1)] + [f"v{i}" for i in range(at) if f"v{i}" in self.recent]
        self.body.lines.insert(at, "late = " + self.choose.choice(FAMILIES["error"][0]).format(a=self.choose.choice(known)))

    def branch(self):
        """Control flow on a shape, which a capture must guard."""
        at = self.choose.randint(0, len(self.body.lines))
        self.body.lines.insert(at, self.choose.choice(["if x0.dim() > 1 and x0.shape[0] > 3: x0 = x0 + 0", "if x0.is_contiguous(): x0 = x0 * 2", "if torch.is_grad_enabled(): x0 = x0 + 1",
                                                       "for i in range(x0.dim()): x0 = x0.unsqueeze(0).squeeze(0)", "if scale > 1: x0 = x0 + 2",
                                                       "for _ in range(24 if x0.dim() > 1 else 0): x0 = x0.transpose(0, 1).reshape(x0.shape)", "for _ in range(9 if x0.dim() > 2 else 0): x0 = x0.transpose(1, 2).reshape(x0.shape).roll((1, 1), (1, 2))"]))

    def finish(self):
        made = [n for n in self.recent if n.startswith("v")]
        results = sorted(set(self.choose.sample(made, min(len(made), 3)) + made[-1:]))
        if self.choose.random() < 0.2 or not results:
            results.append(self.choose.choice(self.recent))
        self.body.results = results
        self.body.form = self.choose.choice(["({})", "({})", "[{}]", "{{{}}}"]) if not self.grad else "({})"
        return self.body


class Program:
    """`training`: gradients too. Of one seed there are several attempts: one on which eager's own results mean nothing says nothing of the engine."""

    def __init__(self, seed, length, training=False, attempt=0, theme=None):
        choose = random.Random(f"{seed} {length} {training} {attempt}")
        self.seed, self.length, self.training, self.attempt = seed, length, training, attempt
        # Of the seed alone: themes of which an attempt settles at once, those that raise, would else take over.
        self.theme = theme or random.Random(f"theme {seed} {training}").choice(sorted(THEMES if not training else set(THEMES) - {"whole", "complex", "masks", "extremes"}))
        about = THEMES[self.theme]
        self.specs = some_arguments(choose, about, training)
        grower = Grower(choose, about, self.specs, training)
        grower.grow(length)
        self.body = grower.finish()
        if choose.random() < 0.2 and len(self.body.lines) > 3:
            grower.branch()
        self.raises = self.theme == "errors" or choose.random() < 0.02
        if self.raises:
            grower.raise_somewhere()
        self.dynamic = choose.choice([None] * 8 + [True, False])
        self.calls = some_calls(choose, self.specs, self.body.module, training)
        if ".copy_(" in self.body.source:  # eager copies onto overlapping memory unasked, and two of its threads race then
            self.calls = [dataclasses.replace(call, threads=min(call.threads, 1)) for call in self.calls]

    def settle(self, errors_of):
        """Most calls are to run: what raises is left out, but for a few, and errors that a program is meant to have. False: the first one does not run."""
        if self.raises:
            return True
        for last in (False, True):
            errors = errors_of(self)
            bad = [i for i, e in enumerate(errors) if e is not None and not MEANT.search(str(e))]
            if 0 in bad or (errors[0] is not None and self.seed % 4):
                return False
            kept = [c for i, c in enumerate(self.calls) if i not in bad or not MUCH.search(str(errors[i])) and (last or (self.seed + i) % 12 == 0)]
            if len(kept) == len(self.calls):
                break
            self.calls = kept
        return True

    def without(self, dropped, dropped_calls=()):
        """The same with lines, results and calls left out."""
        other = copy.copy(self)
        other.body = self.body.without(dropped)
        other.calls = [c for i, c in enumerate(self.calls) if i not in dropped_calls]
        return other

    def describe(self):
        calls = "\n".join(f"# call {i}: " + c.text[2:] for i, c in enumerate(self.calls))
        return f"# seed {self.seed} length {self.length} attempt {self.attempt}, {self.theme}{', training' if self.training else ''}{f', dynamic={self.dynamic}' if self.dynamic is not None else ''}\n{self.body.source}\n{calls}"


def some_arguments(choose, theme, grad):
    shapes = theme.shapes
    base = list(choose.choice(shapes)) if shapes else [choose.choice([1, 2, 3, 4, 7, 8, 16, 33]) for _ in range(choose.randint(0, 4))]
    if base and choose.random() < 0.03 and not shapes:
        base[choose.randrange(len(base))] = 0
    specs = []
    for i in range(choose.randint(1, 3)):
        shape = base
        if i and base:
            shape = [d if choose.random() < 0.85 else 1 for d in base][choose.randint(0, 1) if len(base) > 1 and not shapes else 0:] if choose.random() < 0.8 else list(choose.choice(shapes)) if shapes else base[::-1]
        dtype = choose.choice(theme.dtypes)
        spec = Spec(tuple(shape), dtype, seed=choose.randrange(10**6), special=theme.special if choose.random() < (0.05 if grad else 0.8 if theme.special == "extreme" else 0.12) else "", grad=grad and dtype in ("F32", "F64", "BF16", "F16") and choose.random() < 0.8)
        specs.append(dataclasses.replace(spec, layout=values.some_layout(choose, spec, choose.random() < 0.7)))
    if choose.random() < 0.07:
        specs = values.shared(choose, specs)
    rows = min([s.shape[0] for s in specs if s.shape and s.shape[0]] or [1])
    return [*specs, Spec((choose.choice([1, 2, 5]),), "I64", seed=choose.randrange(10**6), below=rows)]
