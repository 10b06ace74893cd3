"""One world: tensors, programs that reach them, and what happens to them between calls. It is played with the eager programs and with the compiled ones, and their state is compared after each step."""
from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import re
import threading
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

NAMES = re.compile(r"\b[wcht]\d+\b(?!_)")
# How a program takes its tensors: its parameters, what its first line makes of them, and how it is called.
TAKES = {
    "positions": ("{xs}", "", "{f}({given})"),
    "list": ("xs", "{xs}, = xs", "{f}([{given}])"),
    "dict": ("xs", "{xs}, = xs.values()", "{f}({named})"),
    "keywords": ("*, {xs}", "", "{f}(**{named})"),
    "nested": ("a, *, b=None", "({xs},), _ = b['in'], a", "{f}(1, b={{'in': ({given},)}})"),
}


@dataclasses.dataclass
class Program:
    """Lines of code of a function, and what it returns."""
    number: int
    takes: int = 0
    way: str = "positions"
    body: list[str] = dataclasses.field(default_factory=list)
    gives: list[str] = dataclasses.field(default_factory=lambda: ["None"])

    @property
    def name(self):
        return f"f{self.number}"

    def code(self, is_method, rename):
        """is_method: its tensors are its own."""
        xs = ", ".join(f"x{i}" for i in range(self.takes))
        parameters, first, _ = TAKES[self.way if self.takes else "positions"]
        lines = [line for line in (first.format(xs=xs), *(rename(line, is_method) for line in self.body)) if line]
        head = ", ".join(["self"] * is_method + ([parameters.format(xs=xs)] if self.takes else []))
        return f"def {self.name}({head}):\n" + "".join(f"    {line}\n" for line in lines) + f"    return {rename(', '.join(self.gives), is_method)}\n"

    def call(self, given):
        named = "{" + ", ".join(f"'x{i}': {g}" for i, g in enumerate(given)) + "}"
        return TAKES[self.way if self.takes else "positions"][2].format(f=self.name, given=", ".join(given), named=named)


@dataclasses.dataclass
class World:
    seed: int
    made: list[tuple[str, str]]
    programs: list[Program]
    events: list[str]
    dynamic: bool | None = None
    module: bool = False  # the first program is a module's forward, and what it reaches are parameters and buffers
    wild: int = 0  # 0: the programs only compute; 1: they write as well, and set gradients and histories; 2: and take gradients themselves; 3: often, under hooks that come and go

    def of(self, code, is_method=False):
        owner = "self." if is_method else "net."
        return NAMES.sub(rf"{owner}\g<0>", code) if self.module else code

    def code(self, program):
        return program.code(self.module and program.number == 0, self.of)

    def describe(self):
        made = "".join(f"{self.of(name)} = {self.of(code)}\n" for name, code in self.made)
        programs = "".join(map(self.code, self.programs))
        return f"# seed {self.seed}, dynamic={self.dynamic}\n{'net = nn.Module()' if self.module else ''}\n{made}{programs}" + "".join(f"{self.of(e)}\n" for e in self.events)


def some(number, *sizes):
    return torch.rand(sizes, generator=torch.Generator().manual_seed(number), dtype=torch.float64) * 2 - 0.9


def elsewhere(f):
    """In another thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(f).result()


def together(f):
    """In three threads at the same time."""
    start = threading.Barrier(3)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        return [t.result() for t in [threads.submit(lambda: start.wait() and None or f()) for _ in range(3)]][0]


def saving():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)


def checkpointed(f, *args):
    return checkpoint(f, *args, use_reentrant=False)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * 3 * x * x


class Exp(torch.autograd.Function):
    """Saves its result."""
    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class Doubled(torch.autograd.Function):
    """Writes to what it is given."""
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


class Rounded(torch.autograd.Function):
    """Has a result without a gradient."""
    @staticmethod
    def forward(ctx, x, k):
        ctx.k, sign = k, x.sign()
        ctx.mark_non_differentiable(sign)
        return (x * k).round(), sign

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, _):
        return g * ctx.k, None


class Pair(torch.autograd.Function):
    """Is told of gradients that there are not."""
    @staticmethod
    def forward(ctx, a, b):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b)
        return a * 2, b * a.mean()

    @staticmethod
    def backward(ctx, ga, gb):
        a, b = ctx.saved_tensors
        of_a = None if ga is None else ga * 2
        if gb is not None:
            of_mean = ((gb * b).sum() / a.numel()).expand_as(a)
            of_a = of_mean if of_a is None else of_a + of_mean
        return of_a, None if gb is None else gb * a.mean()


def looked(look, t):
    try:
        return look(t)
    except RuntimeError as e:  # of a view whose history cannot be made anew
        return type(e).__name__


class Side:
    """The eager programs or the compiled ones, in a world of their own."""

    def __init__(self, world, compiles):
        self.log, self.versions, self.is_module = [], {}, world.module
        self.scope = {"__name__": "world", "torch": torch, "nn": nn, "F": nn.functional, "copy": copy, "some": some, "hook": self.hook, "ck": checkpointed, "elsewhere": elsewhere, "together": together, "saving": saving,
                      "triple": self.triple, "leaves": self.leaves, "copied": self.copied, **{c.__name__: c for c in (Cube, Exp, Doubled, Rounded, Pair)}}
        net = self.scope["net"] = nn.Module()
        for name, code in world.made:
            made = eval(world.of(code), self.scope)
            if not world.module:
                self.scope[name] = made
            elif name[0] == "c" and isinstance(made, torch.Tensor):
                net.register_buffer(name, made)
            else:
                setattr(net, name, made)
        for program in world.programs:
            exec(world.code(program), self.scope)
        if world.module:
            net.__class__ = type("Net", (nn.Module,), {"forward": self.scope["f0"], "__module__": "world"})
            self.scope["f0"] = net
        self.scope["opt"] = torch.optim.SGD(self.leaves() or [nn.Parameter(torch.ones(1))], lr=0.1)
        if compiles:
            import vitrify
            for program in world.programs:
                self.scope[program.name] = vitrify.compile(self.scope[program.name], dynamic=world.dynamic)

    def tensors(self):
        net = self.scope["net"]
        return {name: t for names in (self.scope, net._parameters, net._buffers, vars(net)) for name, t in names.items() if isinstance(t, torch.Tensor)}

    def leaves(self):
        return [t for name, t in self.tensors().items() if name[0] == "w"]

    def hook(self, number):
        return lambda *_: self.log.append(number)

    def triple(self, number):
        return lambda g: self.log.append(number) or (None if g is None else g * 3)

    def copied(self):
        """The module and what it reaches, once more."""
        if self.is_module:
            self.scope["f0"] = self.scope["net"] = copy.deepcopy(self.scope["f0"])

    def do(self, event):
        try:
            exec(event, self.scope)
        except Exception as e:  # eager's errors are the compiled program's
            return type(e).__name__
        return ""

    def spread(self, name):
        """A call's results by names of their own."""
        made = self.scope.pop(name)
        for i, t in enumerate(made if isinstance(made, tuple) else (made,)):
            if isinstance(t, torch.Tensor):
                self.scope[f"{name}_{i}"] = t

    def state(self):
        """Without what would make a view's history anew."""
        named = self.tensors()
        objects, memory, told = {}, {}, {}
        for name, t in named.items():
            objects.setdefault(id(t), name)
        looks = [lambda t: t.data.tolist(), lambda t: t.is_inference() or t._version - self.versions.setdefault(id(t), (t, t._version))[1], lambda t: t.requires_grad, lambda t: t.is_leaf, lambda t: t.retains_grad, lambda t: objects.get(id(t._base), None),
                 lambda t: t.grad is not None and [t.grad.data.tolist(), t.grad.requires_grad, t.grad.grad_fn is None]]
        for name, t in named.items():
            told[name] = [tuple(t.shape), t.dtype, objects[id(t)], memory.setdefault(t.untyped_storage()._cdata, name), *(looked(look, t) for look in looks)]
        return told, sorted(self.log)  # in which order hooks of several leaves run is not promised

    def end(self):
        """Whether each has a history, which weights it leads to, and what is drawn next."""
        told, all_leaves = {}, [t for t in self.leaves() if looked(lambda t: t.requires_grad and t.is_leaf, t) is True]
        for name, t in self.tensors().items():
            told[name] = []
            if t.requires_grad and all_leaves:
                try:
                    told[name].append(t.grad_fn is None)
                    grads = torch.autograd.grad((t * t).sum(), all_leaves, allow_unused=True, retain_graph=True)
                    told[name] += [None if g is None else g.tolist() for g in grads]
                except RuntimeError as e:
                    told[name].append(type(e).__name__)
        return told, torch.rand(1).item()


def in_one_memory(side):
    """Two leaves have views of one gradient: eager counts each twice from then on (docs/differences.md)."""
    grads = [t.grad for t in {id(t): t for t in side.tensors().values()}.values() if looked(lambda t: t.grad, t) is not None]
    return len({g.untyped_storage()._cdata for g in grads if isinstance(g, torch.Tensor)}) < len(grads)


def run(world, compiles):
    """What was seen after each event."""
    torch.manual_seed(world.seed)
    side, told = Side(world, compiles), []
    for event in world.events:
        raised = side.do(world.of(event))
        if (made := re.search(r"(r\d+) = ", event)) and not raised:
            side.spread(made[1])
        told.append((event, raised, side.state(), in_one_memory(side)))
    return [*told, ("at the end", "", side.end(), False)]


def close(a, b):
    if isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(close, a, b))
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[k], b[k]) for k in b)
    if isinstance(b, float):
        return isinstance(a, float) and (a == b or abs(a - b) <= 1e-8 * (1 + abs(b)) or (a != a and b != b))
    return type(a) is type(b) and a == b


def differences(ours, eager, where=""):
    if isinstance(eager, dict) and isinstance(ours, dict) and ours.keys() == eager.keys():
        return [d for k in eager for d in differences(ours[k], eager[k], f"{where}.{k}")]
    if isinstance(eager, (list, tuple)) and isinstance(ours, (list, tuple)) and len(ours) == len(eager) and not all(isinstance(x, float) for x in eager):
        return [d for i, x in enumerate(eager) for d in differences(ours[i], x, f"{where}[{i}]")]
    return [] if close(ours, eager) else [f"{where}: {str(ours)[:120]}, eager {str(eager)[:120]}"]


def judge(world, tell=lambda at: None):
    """None, or how it differs from eager. `tell` is told when eager has run."""
    eager = run(world, False)
    tell({"seed": world.seed, "program": world.describe()})
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        ours = run(world, True)
    for w in log:
        if "internal error" in str(w.message) or "a compiled call" in str(w.message):  # as oracle.check
            return str(w.message)
    for (event, raised, state, _), (_, error, expected, shared) in zip(ours, eager):
        if raised != error:
            return f"{event}: {raised or 'no error'}, eager {error or 'none'}"
        if error and ("backward(" in event or "autograd.grad(" in event):
            return None  # which gradients it gave, and which hooks ran, before it raised is not promised (docs/differences.md): nor is what follows
        if shared:
            return None
        if found := differences(state, expected):
            return f"{event}: {'; '.join(found[:3])}"
    return None
