"""The calls that are made of one program, in order: arguments, modes, what is done with the results; and one side of a comparison, which makes them."""
from __future__ import annotations

import contextlib
import dataclasses
import linecache
import random

import gradients_of
import layers
import scope as scopes
import torch
import values
from compare import flat, steps, tensors_of
from values import Spec

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


@dataclasses.dataclass(frozen=True)
class Call:
    specs: tuple[Spec, ...] | None  # none: the tensors of the call before
    mode: str = "no_grad"
    driver: str = "out = f(*args)"
    scale: float = 2.0              # the last argument, a number
    event: str = ""                 # what is done to the net before
    threads: int = 0                # none: as many as there are
    training: bool | None = None

    @property
    def text(self):
        about = [self.mode, *([f"threads={self.threads}"] if self.threads else []), *([f"net.train({self.training})"] if self.training is not None else [])]
        made = "".join(f"    x{i} = {s.text}\n" for i, s in enumerate(self.specs[:-1])) + f"    index, scale = {self.specs[-1].text}, {self.scale!r}\n" if self.specs else "    # the same arguments again\n"
        event = f"    {self.event}\n" if self.event else ""
        return f"# {', '.join(about)}\n{event}{made}" + "".join(f"    {line}\n" for line in self.driver.split("\n"))


def some_calls(choose: random.Random, specs, module, grad):
    """The first signature, others, and the first again."""
    def call(specs, driver):
        more = {"scale": choose.choice([2.0, 2.0, 2.0, 0.5, 3, -1.5, 0.0])}
        if choose.random() < 0.15:
            more["threads"] = choose.choice([1, 2])
        if module and choose.random() < 0.25:
            more["training"] = choose.random() < 0.6
        if module and choose.random() < 0.35:
            event = choose.choice(layers.EVENTS)
            more["event"] = event.format(p=f"parameter({choose.randrange(8)})")
        if specs and choose.random() < 0.8:  # what a call computes is not what the one before has computed
            by = 1000 * choose.randrange(2, 1000)
            specs = [dataclasses.replace(s, seed=s.seed + by) for s in specs]
        return Call(tuple(specs) if specs else None, mode if choose.random() < 0.9 else choose.choice(list(MODES)), driver, **more)

    mode = "grad" if grad else choose.choices(list(MODES), [5, 2, 2])[0]
    drivers = list(gradients_of.DRIVERS.values()) if grad else ["out = f(*args)"]
    driver = choose.choice(drivers)
    made = [Call(tuple(specs), mode, driver, training=choose.random() < 0.7 if module else None)]
    again = [call(specs, driver)]
    other = list(specs)
    for _ in range(choose.randint(0, 2)):
        kind = choose.choice(sorted(values.OTHERS))
        other = values.OTHERS[kind](choose, specs if choose.random() < 0.7 else other)
        again.append(call(other, driver if choose.random() < 0.7 else choose.choice(drivers)))
    if grad and choose.random() < 0.3:
        again.append(call(None, driver))
    choose.shuffle(again)
    return [*made, *again, *([call(specs, driver)] if len(again) > 1 else [])]


def is_leaf(t):
    try:
        return t.is_leaf
    except RuntimeError:  # a view whose history may not be asked for
        return False


@dataclasses.dataclass
class Outcome:
    """Of one call: what eager promises, in one order for all sides."""
    error: Exception | None
    leaves: list           # (path, value) of results, what else was told, arguments, gradients, state
    out: object
    args: tuple
    held: list             # what results may be, or share memory with: arguments, parameters, buffers
    bumps: list
    states: list           # of the generators
    did: dict

    def kept(self):
        """Values only, which later calls do not change."""
        return [(p, v.detach().resolve_conj().resolve_neg().clone() if isinstance(v, torch.Tensor) else v) for p, v in self.leaves]


class Side:
    """One callable and all that belongs to it. `compiled`: what makes it another; `around`: a context of each call (for modes that watch or move)."""

    def __init__(self, program, compiled=None, wide=False, jolt=0, around=contextlib.nullcontext):
        self.scope, self.around, self.args = scopes.names(wide, jolt), around, None
        name = f"<fuzz {program.seed}>"
        source = program.body.source
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        exec(compile(source, name, "exec"), self.scope)
        self.net = None
        if program.body.module:
            values.seed(3)
            self.net = self.scope["Net"]()
            moved(self.net, wide, jolt)
        self.f = self.net if self.net is not None else self.scope["program"]
        if compiled:
            self.f = compiled(self.f, dynamic=program.dynamic)
        state = dict(self.net.named_parameters()) | dict(self.net.named_buffers()) if self.net is not None else {}
        floats = [n for n, t in state.items() if t.is_floating_point()]
        self.scope |= {"net": self.net, "f": self.f, "parameter": lambda i: self.net.get_parameter(floats[i % len(floats)]) if floats[i % len(floats)] in dict(self.net.named_parameters())
                       else self.net.get_buffer(floats[i % len(floats)])}

    def state(self):
        return [] if self.net is None else [*self.net.named_parameters(), *self.net.named_buffers()]

    def arguments(self, call):
        scope = dict(self.scope)
        with MODES[call.mode]():
            for i, spec in enumerate(call.specs):
                name = f"x{i}" if i + 1 < len(call.specs) else "index"
                scope[name] = argument(spec, scope)
        return tuple(scope[f"x{i}"] for i in range(len(call.specs) - 1)) + (scope["index"], call.scale)

    def make(self, call, number, counters=dict):
        if self.net is not None and call.training is not None:
            self.net.train(call.training)
        if call.event:
            try:
                exec(call.event, self.scope)
            except Exception:  # the net has no such parameter, or it is of another kind: the same on all sides
                pass
        if call.specs is not None:
            self.args = self.arguments(call)
        scope = self.scope | {"args": self.args, "out": (), "told": ()}
        watched = [t for _, t in [*tensors_of(self.args), *self.state()]]
        version = lambda t: None if t.is_inference() else t._version  # noqa: E731
        before, versions, threads, error = dict(counters()), [version(t) for t in watched], torch.get_num_threads(), None
        values.seed(11 + number)
        if call.threads:
            torch.set_num_threads(call.threads)
        try:
            with MODES[call.mode](), self.around():
                exec(call.driver, scope)
        except Exception as problem:
            error = problem.with_traceback(None)  # frames of a checkpoint hold its hooks on the stack as long as they live
        torch.set_num_threads(threads)
        bumps = [v is not None and version(t) - v for t, v in zip(watched, versions)]
        did = {k: v - before.get(k, 0) for k, v in dict(counters()).items()}
        out = () if error else (scope["out"], scope["told"])
        leaves = flat(out) + flat(self.args, "in") + [(f"grad of {p}", t.grad) for p, t in [(p.replace("out", "in", 1), t) for p, t in tensors_of(self.args)] if is_leaf(t) and not t.is_inference()]
        leaves += [x for name, t in self.state() for x in ((f"net.{name}", t), (f"grad of net.{name}", t.grad))]
        if error is not None:  # how far a backward came before it raised is not promised, nor what later ones add to
            for t in [t for _, t in [*tensors_of(self.args), *self.state()]]:
                if is_leaf(t) and not t.is_inference():
                    t.grad = None
        return Outcome(error, leaves, out, self.args, [self.args, [t for _, t in self.state()]], bumps, [torch.get_rng_state(), self.scope["generator"].get_state()], did)


def argument(spec, scope):
    try:
        return eval(spec.text, scope)
    except (RuntimeError, IndexError):  # no such view of an argument of this shape
        return eval(dataclasses.replace(spec, view="", layout="contiguous").text, scope)


def moved(net, wide, jolt):
    for i, t in enumerate([*net.parameters(), *net.buffers()]):
        if jolt and t.is_floating_point():
            t.data.mul_(steps(t, 104729 * jolt + i))
    if wide:
        net.double()
