"""Random worlds: tensors that a program is given and that it reaches by itself - weights, values with a history, views of both - and what happens to them between its calls: writes, steps
of optimizers, gradients taken and set, hooks, weights frozen and replaced. The same is done with the compiled program as with the eager one; the state of all is compared after each step.

worlds.py [--n N] [--seed S] [--jobs J] [--print] [--reduce] [--report FILE.md] [--commit C]"""
from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import faulthandler
import json
import random
import re
import selectors
import subprocess
import sys
import time
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
sys.path.append(str(HERE.parent.parent))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

SIZES = ["3", "4, 3", "2, 3", "3, 3"]
MADE = {"w": ["nn.Parameter(some({n}, {s}))"], "c": ["some({n}, {s})"], "h": ["{a} * 2", "{a}.sin()", "{a} + {b}"],
        "t": ["{a}[1:]", "{a}.view(-1)", "{a}.mT", "{a}.detach()", "{a}.data", "{a}[..., :2]", "{a}.expand(2, *{a}.shape)", "{a}.unsqueeze(0)", "{a}.chunk(2)[0]", "torch.no_grad()(lambda: {a}[1:])()",
              "{a}[1:].detach().requires_grad_()", "{a}[:]"]}
LINES = {
    30: ["{v} = {a} * {b}", "{v} = {a} + {b}", "{v} = {a}.sin()", "{v} = {a} * 0.5 - 1", "{v} = {a}.sum(-1, keepdim=True)", "{v} = {a} @ {b}.mT", "{v} = torch.cat([{a}, {b}])", "{v} = {a}.exp() + {b}.detach()",
         "{v} = {a}.softmax(-1)", "{v} = ck(lambda a: a * {b}.sin(), {a} * 1)", "{v} = torch.where({a} > 0, {a}, {b})", "{v} = {a}.clone()", "{v} = torch.nn.functional.linear({a}, {b})", "{v} = {a}.square().mean()", "{v} = {a}.reshape(-1)"],
    12: ["{v} = {a}[1:]", "{v} = {a}.view(-1)", "{v} = {a}.mT", "{v} = {a}.detach()", "{v} = {a}.data", "{v} = {a}[..., :2]", "{v} = {a}.unsqueeze(0)", "{v} = {a}.expand(2, *{a}.shape)", "{v} = {a}.chunk(2)[0]",
         "{v} = {a}[0]", "{v}, {u} = {a}.split(1, -1)[:2]"],
    10: ["{a}.mul_({b})", "{a}.add_(1)", "{a}[0] = 2", "{a}.copy_({b})", "{a}.zero_()", "{a}.sin_()", "torch.add({b}, 1, out={a})", "{a}.data.mul_(2)", "{a}.detach().add_(1)", "{a}.relu_()", "{a}[1:].mul_(3)"],
    4: ["{v} = {a}.grad * 2", "{a}.grad = {b}.detach()", "{a}.grad = None", "{a}.grad.mul_(2)", "{a}.requires_grad_()", "{a}.detach_()", "{a}.unsqueeze_(0)", "{a}.retain_grad()", "{a}.grad.zero_()", "{a}.t_()"],
    5: ["{v}, = torch.autograd.grad(({a} * {b}).sum(), {a})", "{v}, = torch.autograd.grad({a}.sin().sum(), {b}, create_graph=True)", "{a}.sum().backward()", "{v}, = torch.autograd.grad(({a} * 2).sum(), {a}, create_graph=True)",
        "({a} * {b}).sum().backward()"],
}
AROUND = {6: "{}", 3: "with torch.no_grad(): {}", 1: "with torch.enable_grad(): {}", 0.3: "with torch.inference_mode(): {}"}
EVENTS = {
    14: ["{r} = f({g})"],
    4: ["with torch.no_grad(): {r} = f({g})", "{r} = elsewhere(lambda: f({g}))", "with torch.inference_mode(): {r} = f({g})", "with saving(): {r} = f({g})"],
    9: ["{r}.sum().backward()", "elsewhere(lambda: {r}.sum().backward())", "{r}.sum().backward(retain_graph=True)", "{r}.sum().backward(inputs=[{w}])", "torch.autograd.grad({r}.sum(), {w}, allow_unused=True)",
        "k{n} = torch.autograd.grad({r}.sin().sum(), {w}, create_graph=True, allow_unused=True)[0]", "({r} * {a}).sum().backward()", "({a} * 2).sum().backward()", "(lambda g: g.square().sum().backward())(torch.autograd.grad({r}.square().sum(), {w}, create_graph=True)[0])",
        "torch.autograd.grad({r}.sum(), {a}, retain_graph=True, allow_unused=True)"],
    7: ["with torch.no_grad(): {a}.mul_(1.5)", "with torch.no_grad(): {a}[0] = 3", "{a}.mul_(2)", "{w}.data = {w}.data * 2", "{a}.data.add_(1)", "with torch.no_grad(): {r}.add_(1)", "{r}.mul_(2)", "{a}.detach().add_(1)", "{a}.copy_({b})"],
    6: ["opt.step()", "opt.zero_grad()", "opt.zero_grad(set_to_none=False)", "{w}.grad = torch.ones_like({w})", "{w}.grad = None", "{w}.grad = {b}", "{w}.grad.data.mul_(2)"],
    3.5: ["{w}.requires_grad_(False)", "{w}.requires_grad_()", "{a}.retain_grad()", "{a}.register_hook(hook({n}))", "{w}.register_post_accumulate_grad_hook(after({n}))", "{r}.register_hook(hook({n}))", "{r}.retain_grad()",
        "{w}.register_hook(triple({n}))"],
    3: ["{a} = {b}[1:]", "{a} = {w}[1:]", "{a} = {w} * 2", "{a} = {a}.detach()", "{a} = {r}", "{a} = {a}.clone()", "{w} = nn.Parameter({w}.data.clone())", "opt = torch.optim.SGD(leaves(), lr=0.1, momentum=0.5)"],
}


def pick(choose, table):
    return choose.choices(list(table.values()), list(table))[0]


@dataclasses.dataclass
class World:
    """Lines of code: what is made, the program's body, what it returns, and what happens."""
    seed: int
    made: list[tuple[str, str]]
    takes: int
    body: list[str]
    gives: list[str]
    events: list[str]
    dynamic: bool | None = None
    module: bool = False  # the program is a module's forward, and what it reaches are parameters and buffers
    wild: int = 0  # 0: the program only computes; 1: it writes as well, and sets gradients and histories; 2: and takes gradients itself

    def of(self, code, owner):
        return re.sub(r"\b[wcht]\d+\b(?!_)", rf"{owner}.\g<0>", code) if self.module else code

    @property
    def program(self):
        body = "".join(f"    {self.of(line, 'self')}\n" for line in self.body)
        return f"def f({', '.join(['self'] * self.module + [f'x{i}' for i in range(self.takes)])}):\n{body}    return {self.of(', '.join(self.gives), 'self')}\n"

    def describe(self):
        made = "".join(f"{self.of(name, 'net')} = {self.of(code, 'net')}\n" for name, code in self.made)
        return f"# seed {self.seed}, dynamic={self.dynamic}\n{'net = nn.Module()' if self.module else ''}\n{made}{self.program}" + "".join(f"{self.of(e, 'net')}\n" for e in self.events)


def some(number, *sizes):
    return torch.rand(sizes, generator=torch.Generator().manual_seed(number), dtype=torch.float64) * 2 - 0.9


def tensors_in(scope):
    net = scope["net"]
    return {name: t for names in (scope, net._parameters, net._buffers, vars(net)) for name, t in names.items() if isinstance(t, torch.Tensor)}


def elsewhere(f):
    """In another thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(f).result()


def saving():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t)


def checkpointed(f, *args):
    return checkpoint(f, *args, use_reentrant=False)


def looked(look, t):
    try:
        return look(t)
    except RuntimeError as e:  # of a view whose history cannot be made anew
        return type(e).__name__


def leaves(scope):
    return [t for name, t in tensors_in(scope).items() if name[0] == "w"]


class Side:
    """The eager program or the compiled one, in a world of its own."""

    def __init__(self, world, compiles):
        self.log, self.versions = [], {}
        self.scope = {"__name__": "world", "torch": torch, "nn": nn, "some": some, "hook": self.hook, "after": self.hook, "ck": checkpointed, "elsewhere": elsewhere, "saving": saving, "triple": lambda n: lambda g: self.log.append(n) or g * 3, "leaves": lambda: leaves(self.scope)}
        self.net = self.scope["net"] = nn.Module()
        for name, code in world.made:
            made = eval(world.of(code, "net"), self.scope)
            if not world.module:
                self.scope[name] = made
            elif name[0] == "c" and isinstance(made, torch.Tensor):
                self.net.register_buffer(name, made)
            else:
                setattr(self.net, name, made)
        exec(world.program, self.scope)
        if world.module:
            self.net.__class__ = type("Net", (nn.Module,), {"forward": self.scope["f"], "__module__": "world"})
            self.scope["f"] = self.net
        self.scope["opt"] = torch.optim.SGD(leaves(self.scope) or [nn.Parameter(torch.ones(1))], lr=0.1)
        if compiles:
            import vitrify
            self.scope["f"] = vitrify.compile(self.scope["f"], dynamic=world.dynamic)

    def hook(self, number):
        return lambda *_: self.log.append(number)

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
        named = tensors_in(self.scope)
        objects, memory, told = {}, {}, {}
        for name, t in named.items():
            objects.setdefault(id(t), name)
        looks = [lambda t: t.data.tolist(), lambda t: t.is_inference() or t._version - self.versions.setdefault(id(t), (t, t._version))[1], lambda t: t.requires_grad, lambda t: t.is_leaf, lambda t: t.retains_grad, lambda t: objects.get(id(t._base), None),
                 lambda t: t.grad is not None and [t.grad.data.tolist(), t.grad.requires_grad, t.grad.grad_fn is None]]
        for name, t in named.items():
            told[name] = [tuple(t.shape), objects[id(t)], memory.setdefault(t.untyped_storage()._cdata, name), *(looked(look, t) for look in looks)]
        return told, list(self.log)

    def end(self):
        """Whether each has a history, and which weights it leads to."""
        told, all_leaves = {}, [t for t in leaves(self.scope) if looked(lambda t: t.requires_grad and t.is_leaf, t) is True]
        for name, t in tensors_in(self.scope).items():
            told[name] = []
            if t.requires_grad and all_leaves:
                try:
                    told[name].append(t.grad_fn is None)
                    grads = torch.autograd.grad((t * t).sum(), all_leaves, allow_unused=True, retain_graph=True)
                    told[name] += [None if g is None else g.tolist() for g in grads]
                except RuntimeError as e:
                    told[name].append(type(e).__name__)
        return told, list(self.log)


def run(world, compiles):
    """What was seen after each event."""
    side, told = Side(world, compiles), []
    for event in world.events:
        raised = side.do(world.of(event, "net"))
        if (made := re.search(r"(r\d+) = ", event)) and not raised:
            side.spread(made[1])
        told.append((event, raised, side.state()))
    return [*told, ("at the end", "", side.end())]


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


def judge(world):
    """None, or how it differs from eager."""
    eager = run(world, False)
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        ours = run(world, True)
    for w in log:
        if "internal error" in str(w.message):
            return str(w.message)
    for (event, raised, state), (_, error, expected) in zip(ours, eager):
        if raised != error:
            return f"{event}: {raised or 'no error'}, eager {error or 'none'}"
        if found := differences(state, expected):
            return f"{event}: {'; '.join(found[:3])}"
    return None


class Maker:
    def __init__(self, seed):
        self.choose = random.Random(seed)
        self.world = World(seed, [], 0, [], [], [], self.choose.choice([None, None, True, False]), self.choose.random() < 0.3, self.choose.choice([0, 0, 0, 1, 1, 2]))

    def make(self):
        choose, w = self.choose, self.world
        kinds = ["w", *choose.choices(list(MADE), [3, 2, 2, 4], k=choose.randrange(2, 6))]
        for n, kind in enumerate(kinds):
            known = [name for name, _ in w.made]
            for _ in range(5):
                code = choose.choice(MADE[kind]).format(n=n + w.seed % 97, s=choose.choice(SIZES), a=choose.choice(known or ["_"]), b=choose.choice(known or ["_"]))
                if self.runs([*w.made, (f"{kind}{n}", code)]):
                    w.made.append((f"{kind}{n}", code))
                    break
        w.takes = choose.randrange(0, 3)
        names = [name for name, _ in w.made]
        first = [choose.choice(names) if choose.random() < 0.6 else f"some({choose.randrange(50)}, {choose.choice(SIZES)})" for _ in range(w.takes)]
        self.write_body(first)
        self.write_events(first)
        return w

    def runs(self, made):
        scope = {"torch": torch, "nn": nn, "some": some}
        try:
            for name, code in made:
                scope[name] = eval(code, scope)
        except (RuntimeError, IndexError, ValueError, TypeError, NameError):
            return False
        return not isinstance(scope[name], torch.Tensor) or scope[name].dim() > 0

    def write_body(self, first):
        """Lines that run one after the other in eager, but for some."""
        choose, w = self.choose, self.world
        local = [f"x{i}" for i in range(w.takes)]
        for _ in range(choose.randrange(1, 9)):
            around = pick(choose, AROUND) if w.wild else "{}"
            known = [name for name, _ in w.made] + 2 * local
            v = f"v{len(w.body)}"
            line = choose.choice(pick(choose, dict(list(LINES.items())[:(2, 4, 5)[w.wild]]))).format(v=v, u="u" + v, a=choose.choice(known), b=choose.choice(known))
            line = around.format(line)
            w.gives = ["None"]
            w.body.append(line)
            if run_quietly(w, [f"r = f({', '.join(first)})"])[0][1] and choose.random() < 0.97:
                w.body.pop()
            elif f"{v} = " in line or f"{v}, " in line:
                local.append(v)
        w.gives = [choose.choice([*local[w.takes:], *local, *(name for name, _ in w.made)]) for _ in range(choose.randrange(1, 4))]

    def write_events(self, first):
        choose, w = self.choose, self.world
        results, calls = [], 0
        made = [name for name, _ in w.made]
        weights = [name for name in made if name[0] == "w"]
        for n in range(choose.randrange(3, 14)):
            template = choose.choice(pick(choose, EVENTS)) if calls else "{r} = f({g})"
            if "f({g})" in template:
                given = [g if choose.random() < 0.6 else choose.choice(made) if choose.random() < 0.4 else f"some({choose.randrange(50)}, {choose.choice([*SIZES, '5, 3', '1, 3', '6, 3'])})" for g in first]
                event, result = template.format(r=f"r{n}", g=", ".join(given)), f"r{n}"
            elif "{r}" in template and not results:
                continue
            else:
                event, result = template.format(r=choose.choice(results or [""]), a=choose.choice(made), b=choose.choice(made), w=choose.choice(weights), n=n), None
            w.events.append(event)
            seen = run_quietly(w, w.events)
            if seen[len(w.events) - 1][1] and choose.random() < 0.8:
                w.events.pop()
            elif result and not seen[len(w.events) - 1][1]:
                calls += 1
                results += [f"{result}_{i}" for i, g in enumerate(w.gives) if g != "None"]


def run_quietly(world, events):
    return run(dataclasses.replace(world, events=events), False)


def shortest(world):
    """The world without what it differs without."""
    def differs(w):
        try:
            return judge(w) is not None
        except Exception:
            return False
    changed = True
    while changed:
        changed = False
        for part in ("events", "body", "gives", "made"):
            for i in reversed(range(len(getattr(world, part)))):
                fewer = dataclasses.replace(world, **{part: [x for k, x in enumerate(getattr(world, part)) if k != i]})
                if (part != "gives" or fewer.gives) and differs(fewer):
                    world, changed = fewer, True
    return world


def one(seed, reduces=False):
    """What came of it: how many calls ran compiled, and what differs."""
    import vitrify
    world = Maker(seed).make()
    before = dict(vitrify.counters)
    try:
        message = judge(world)
        did = {k: vitrify.counters[k] - before[k] for k in ("compiled_calls", "eager_calls", "kernels_launched")}
        if message and reduces:
            world = shortest(world)
            message = judge(world)
    except Exception as e:
        message, did = f"the test itself: {type(e).__name__}: {e}", {}
    return {"seed": seed, "message": message, "program": world.describe() if message else "", **did}


def serve(args):
    torch.set_num_threads(1)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    for seed in range(args.seed, args.seed + args.n, args.stride):
        print(json.dumps(one(seed, args.reduce)), flush=True)


def all_of(args):
    """In processes of their own: one that dies takes its world with it, and no other."""
    def start(first):
        command = [sys.executable, __file__, "--serve", "--seed", str(first), "--n", str(args.seed + args.n - first), "--stride", str(args.jobs), *(["--reduce"] if args.reduce else [])]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    running = {start(args.seed + j): args.seed + j for j in range(min(args.jobs, args.n))}
    waits = selectors.DefaultSelector()
    for p in running:
        waits.register(p.stdout, selectors.EVENT_READ, p)
    results = []
    while running:
        for key, _ in waits.select():
            p = key.data
            if line := p.stdout.readline():
                results.append(json.loads(line))
                running[p] = results[-1]["seed"] + args.jobs
                if results[-1]["message"]:
                    print(f"seed {results[-1]['seed']}: {results[-1]['message']}\n{results[-1]['program']}", flush=True)
                continue
            waits.unregister(p.stdout)
            seed = running.pop(p)
            if p.wait() and seed < args.seed + args.n:
                results.append({"seed": seed, "message": f"the process ended with {p.returncode}", "program": ""})
                print(f"seed {seed}: the process ended with {p.returncode}", flush=True)
                if seed + args.jobs < args.seed + args.n:
                    running[again := start(seed + args.jobs)] = seed + args.jobs
                    waits.register(again.stdout, selectors.EVENT_READ, again)
    return sorted(results, key=lambda r: r["seed"])


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("n", 200), ("seed", 0), ("jobs", 1), ("stride", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("print", "reduce", "serve"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--commit")
    args = parser.parse_args(argv)
    if args.print:
        for seed in range(args.seed, args.seed + args.n):
            print(Maker(seed).make().describe())
        return 0
    if args.serve:
        serve(args)
        return 0
    begin, results = time.time(), all_of(args)
    total = collections.Counter()
    for r in results:
        total.update({k: r.get(k, 0) for k in ("compiled_calls", "eager_calls", "kernels_launched")})
    failed = [r for r in results if r["message"]]
    text = (f"{len(results)} worlds from seed {args.seed}: {len(failed)} differ; {total['compiled_calls']} calls compiled, {total['eager_calls']} eager, {total['kernels_launched']} kernels "
            f"({time.time() - begin:.0f} s)")
    print(text)
    if args.report:
        listed = "".join(f"\n## seed {r['seed']}\n\n{r['message']}\n\n```python\n{r['program']}```\n" for r in failed)
        args.report.write_text(f"# Random worlds, compiled beside eager\n\nWritten by `tests/fuzz/worlds.py --n {args.n} --seed {args.seed}` at {args.commit}, torch {torch.__version__}.\n\n{text}.\n{listed}")
    return bool(failed) or total["compiled_calls"] <= total["eager_calls"] or not total["kernels_launched"]


if __name__ == "__main__":
    sys.exit(main())
