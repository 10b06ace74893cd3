"""Random worlds: tensors that programs are given and that they reach by themselves - weights, values with a history, views of both - and what happens to them between calls: writes, steps
of optimizers, gradients taken and set, hooks, weights frozen and replaced. The same is done with the compiled programs as with the eager ones; the state of all is compared after each step.

worlds.py [--n N] [--seed S] [--jobs J] [--print] [--reduce] [--report FILE.md] [--commit C] [--limit SECONDS]"""
from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import random
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
sys.path.append(str(HERE.parent.parent))

import provenance  # noqa: E402
import report  # noqa: E402
import worker  # noqa: E402
from world import Program, World, judge, run, some  # noqa: E402

EAGER, LEFT = 0.35, 0.01  # of the calls, and of the worlds, at most
SIZES = ["3", "4, 3", "2, 3", "3, 3"]
MADE = {"w": ["nn.Parameter(some({n}, {s}))", "nn.Parameter(some({n}, {s}))", "nn.Parameter(some({n}, {a}.numel()))"], "c": ["some({n}, {s})"], "h": ["{a} * 2", "{a}.sin()", "{a} + {b}"],
        "t": ["{a}[1:]", "{a}.view(-1)", "{a}.mT", "{a}.detach()", "{a}.data", "{a}[..., :2]", "{a}.expand(2, *{a}.shape)", "{a}.unsqueeze(0)", "{a}.chunk(2)[0]", "torch.no_grad()(lambda: {a}[1:])()",
              "{a}[1:].detach().requires_grad_()", "{a}[:]"]}
LINES = {
    30: ["{v} = {a} * {b}", "{v} = {a} + {b}", "{v} = {a}.sin()", "{v} = {a} * 0.5 - 1", "{v} = {a}.sum(-1, keepdim=True)", "{v} = {a} @ {b}.mT", "{v} = torch.cat([{a}, {b}])", "{v} = {a}.clamp(max=2).exp() + {b}.detach()",
         "{v} = {a}.softmax(-1)", "{v} = ck(lambda a: a * {b}.sin(), {a} * 1)", "{v} = torch.where({a} > 0, {a}, {b})", "{v} = {a}.clone()", "{v} = F.linear({a}, {b})", "{v} = {a}.square().mean()", "{v} = {a}.reshape(-1)", "{v} = {a}.view({b}.shape) + {b}", "{v} = {a}.reshape({b}.shape) + {b}"],
    15: ["{v} = F.layer_norm({a}, {a}.shape[-1:])", "{v} = {a}.cumsum(-1)", "{v} = {a}.var(-1)", "{v} = {a}.prod(-1)", "{v} = {a}.amax(-1)", "{v} = {a}.norm()", "{v} = {a}.flip(-1)", "{v} = {a}.roll(1, 0)", "{v} = torch.stack([{a}, {b}])",
         "{v} = {a}.tril()", "{v} = torch.lerp({a}, {b}, 0.3)", "{v}, {u} = {a}.sort(-1)", "{v} = {a}.topk(2)[0]", "{v} = {a}.clamp(-0.5, 0.5)", "{v} = {a}.index_select(0, torch.tensor([1, 0]))", "{v} = {a}[torch.tensor([0, 1, 0])]",
         "{v} = {a}.gather(-1, {b}.argsort(-1))", "{v} = torch.zeros_like({a}).scatter_add(0, {b}.long().abs() % 2, {a})", "{v} = {a}.masked_fill({b} > 0, 0.5)", "{v} = F.dropout({a})", "{v} = {a} * torch.rand_like({a})", "{v} = F.mse_loss({a}, {b})",
         "{v} = torch.einsum('...i,...i->...', {a}, {b})", "{v} = F.gelu({a})", "{v} = {a}.pow(2) / ({b}.abs() + 1)", "{v} = {a}.repeat(2, 1)", "{v} = F.pad({a}, [1, 0])", "{v} = torch.addcmul({a}, {b}, {b}, value=0.5)", "{v} = {a}.index_add(0, torch.tensor([0, 1]), {b}[:2])"],
    8: ["{v} = Cube.apply({a})", "{v} = Exp.apply({a}.clamp(max=2))", "{v} = Doubled.apply({a} * 1)", "{v}, {u} = Rounded.apply({a}, 3)", "{v}, {u} = Pair.apply({a}, {b})", "{v} = torch.func.vmap(lambda a: a * 2 + {b}.sum())({a})", "{v} = torch.func.grad(lambda a: (a * a * {b}.sum()).sum())({a})",
        "{v} = torch.func.jvp(lambda a: a.sin() * {b}.sum(), ({a},), ({a} * 2,))[1]", "{v} = torch.func.vmap(torch.func.grad(lambda a: a.square().sum()))({a})", "{v} = torch.func.vjp(lambda a: a.exp(), {a})[1]({a})[0]"],
    12: ["{v} = {a}[1:]", "{v} = {a}.view(-1)", "{v} = {a}.mT", "{v} = {a}.detach()", "{v} = {a}.data", "{v} = {a}[..., :2]", "{v} = {a}.unsqueeze(0)", "{v} = {a}.expand(2, *{a}.shape)", "{v} = {a}.chunk(2)[0]",
         "{v} = {a}[0]", "{v}, {u} = {a}.split(1, -1)[:2]", "{v} = {a}.diagonal()", "{v} = {a}.unfold(0, 2, 1)", "{v} = {a}.view_as({b})"],
    10: ["{a}.mul_({b})", "{a}.add_(1)", "{a}[0] = 2", "{a}.copy_({b})", "{a}.zero_()", "{a}.sin_()", "torch.add({b}, 1, out={a})", "{a}.data.mul_(2)", "{a}.detach().add_(1)", "{a}.relu_()", "{a}[1:].mul_(3)", "torch._foreach_mul_([{a}, {b}], 2)",
         "{a}.addcmul_({b}, {b})", "{a}.masked_fill_({b} > 0, 1)", "{a}.index_add_(0, torch.tensor([0]), {b}[:1])", "{a}[{a} > 0.5] = 0.25", "{a}[..., 0] -= 1", "{a}.clamp_(max=0.5)", "Doubled.apply({a})", "{a}.lerp_({b}, 0.1)", "{a}.set_({b}.detach().clone())", "{a}.uniform_()"],
    4: ["{v} = {a}.grad * 2", "{a}.grad = {b}.detach()", "{a}.grad = None", "{a}.grad.mul_(2)", "{a}.requires_grad_()", "{a}.detach_()", "{a}.unsqueeze_(0)", "{a}.retain_grad()", "{a}.grad.zero_()", "{a}.t_()", "{a}.requires_grad_(False)", "{a}.requires_grad_(False); {v} = {b} * 2; {a}.requires_grad_()"],
    5: ["{v}, = torch.autograd.grad(({a} * {b}).sum(), {a})", "{v}, = torch.autograd.grad({a}.sin().sum(), {b}, create_graph=True)", "{a}.sum().backward()", "{v}, = torch.autograd.grad(({a} * 2).sum(), {a}, create_graph=True)",
        "({a} * {b}).sum().backward()", "({a} * {b}).sum().backward(); {a}.grad = None", "({a} * {b}).sum().backward(inputs=[{a}]); {v} = {a}.grad.clone(); {a}.grad = None",
        "u{v} = {a}.grad; {a}.grad = None; ({a} * {b}).sin().sum().backward(); {v} = {a}.grad; {a}.grad = u{v}", "({a} * {b}).sin().sum().backward(); {a}.data.sub_({a}.grad, alpha=0.01); {a}.grad = None",
        "{v} = [g for g in (torch.autograd.grad(({b} * {b}).sum(), {a}, allow_unused=True)[0], {a}) if g is not None][0] * 1", "({b} * {b}).sum().backward(inputs=[{a}])",
        "{v}, = torch.autograd.grad({b}.square().sum(), {a}, retain_graph=True)",
        "{a}.requires_grad_(False); {v} = {a} * {b}; {a}.requires_grad_(); {v} = {v} + {a}", "{a}.requires_grad_(False); {v} = {b}.sin() * (2 if {b}.requires_grad else 3); {a}.requires_grad_()", "{a}.requires_grad_(False); {v} = {a}.sin(); {a}.requires_grad_()"],
}
WRITES = ("_(", "out=", "] = ", "] -= ", "Doubled")
TAKES_GRADIENTS, HOOKS = 5, 3.5  # more of these where a program steps
AROUND = {6: "{}", 3: "with torch.no_grad(): {}", 1: "with torch.enable_grad(): {}", 0.3: "with torch.inference_mode(): {}"}
CALLS = {
    14: ["{r} = {call}"],
    4: ["with torch.no_grad(): {r} = {call}", "{r} = elsewhere(lambda: {call})", "with torch.inference_mode(): {r} = {call}", "with saving(): {r} = {call}", "{r} = together(lambda: {call})", "{r} = ck(lambda a: {call}, {a} * 1)"],
}
EVENTS = {
    9: ["{r}.sum().backward()", "elsewhere(lambda: {r}.sum().backward())", "{r}.sum().backward(retain_graph=True)", "{r}.sum().backward(inputs=[{w}])", "torch.autograd.grad({r}.sum(), {w}, allow_unused=True)",
        "k{n} = torch.autograd.grad({r}.sin().sum(), {w}, create_graph=True, allow_unused=True)[0]", "({r} * {a}).sum().backward()", "({a} * 2).sum().backward()", "(lambda g: g.square().sum().backward())(torch.autograd.grad({r}.square().sum(), {w}, create_graph=True)[0])",
        "torch.autograd.grad({r}.sum(), {a}, retain_graph=True, allow_unused=True)", "({r}.sum() + {r2}.sin().sum()).backward()", "k{n} = torch.autograd.grad([{r}, {r2}], {w}, [torch.ones_like({r}), torch.ones_like({r2})], retain_graph=True)[0]"],
    7: ["with torch.no_grad(): {a}.mul_(1.5)", "with torch.no_grad(): {a}[0] = 3", "{a}.mul_(2)", "{w}.data = {w}.data * 2", "{a}.data.add_(1)", "with torch.no_grad(): {r}.add_(1)", "{r}.mul_(2)", "{a}.detach().add_(1)", "{a}.copy_({b})", "{w}.data.numpy()[...] += 1",
        "torch.manual_seed({n})"],
    6: ["opt.step()", "opt.step()", "opt.zero_grad()", "opt.zero_grad(set_to_none=False)", "{w}.grad = torch.ones_like({w})", "{w}.grad = None", "{w}.grad = {b}", "{w}.grad.data.mul_(2)", "nn.utils.clip_grad_norm_(leaves(), 0.5)"],
    3.5: ["{w}.requires_grad_(False)", "{w}.requires_grad_()", "{a}.retain_grad()", "{a}.register_hook(hook({n}))", "{w}.register_post_accumulate_grad_hook(hook({n}))", "{r}.register_hook(hook({n}))", "{r}.retain_grad()",
          "{w}.register_hook(triple({n}))", "torch.autograd.graph.register_multi_grad_hook(({a}, {b}), hook({n}))", "torch.autograd.graph.register_multi_grad_hook(({r}, {w}), hook({n}), mode='any')", "{a}.grad_fn.register_hook(hook({n}))", "{a}.grad_fn.register_prehook(hook({n}))"],
    3: ["{a} = {b}[1:]", "{a} = {w}[1:]", "{a} = {w} * 2", "{a} = {a}.detach()", "{a} = {r}", "{a} = {a}.clone()", "{w} = nn.Parameter({w}.data.clone())", "opt = torch.optim.SGD(leaves(), lr=0.1, momentum=0.5)", "opt = torch.optim.Adam(leaves(), lr=0.1)",
        "opt = torch.optim.AdamW(leaves(), lr=0.1, fused=True)", "opt = torch.optim.RMSprop(leaves(), foreach=True)", "{w} = copy.deepcopy({w})", "copied()", "net.load_state_dict({{k: v * 2 for k, v in net.state_dict().items()}})",
        "net.load_state_dict({{k: v * 2 for k, v in net.state_dict().items()}}, assign=True)", "net.train(not net.training)", "net.float().double()", "del {r}"],
}


def pick(choose, table):
    return choose.choices(list(table.values()), list(table))[0]


class Maker:
    def __init__(self, seed):
        choose = self.choose = random.Random(seed)
        programs = [Program(i, choose.randrange(0, 3), choose.choice(["positions"] * 6 + ["list", "dict", "keywords", "nested"])) for i in range(choose.choice([1, 1, 1, 2, 3]))]
        self.world = World(seed, [], programs, [], choose.choice([None, None, True, False]), choose.random() < 0.3, choose.choice([0, 0, 0, 1, 1, 2, 3]))

    def make(self):
        choose, w = self.choose, self.world
        kinds = ["w", *choose.choices(list(MADE), [3, 2, 2, 4] if w.wild < 3 else [3, 2, 0, 0.3], k=choose.randrange(2, 6))]
        for n, kind in enumerate(kinds):
            known = [name for name, _ in w.made]
            for _ in range(5):
                code = (choose.choice(MADE[kind]) if known else MADE[kind][0]).format(n=n + w.seed % 97, s=choose.choice(SIZES), a=choose.choice(known or ["_"]), b=choose.choice(known or ["_"]))
                if self.runs([*w.made, (f"{kind}{n}", code)]):
                    w.made.append((f"{kind}{n}", code))
                    break
        names = [name for name, _ in w.made]
        first = {p.name: [choose.choice(names) if choose.random() < (0.6 if w.wild < 3 else 0.25) else self.fresh(SIZES) for _ in range(p.takes)] for p in w.programs}
        for p in w.programs:
            self.write_body(p, first[p.name])
        self.write_events(first)
        return w

    def fresh(self, sizes):
        return f"some({self.choose.randrange(50)}, {self.choose.choice(sizes)})"

    def runs(self, made):
        import torch
        scope = {"torch": torch, "nn": torch.nn, "some": some}
        try:
            for name, code in made:
                scope[name] = eval(code, scope)
        except (RuntimeError, IndexError, ValueError, TypeError, NameError):
            return False
        return not isinstance(scope[name], torch.Tensor) or scope[name].dim() > 0

    def write_body(self, p, first):
        """Lines that run one after the other in eager, but for some."""
        choose, w = self.choose, self.world
        local = [f"x{i}" for i in range(p.takes)]
        weights = [name for name, _ in w.made if name[0] == "w"]
        for _ in range(choose.randrange(2, 13)):
            around = pick(choose, AROUND) if w.wild else "{}"
            known = [name for name, _ in w.made] + 2 * local
            v = f"v{len(p.body)}"
            steps = w.wild == 3 and choose.random() < 0.3
            templates = LINES[TAKES_GRADIENTS] if steps else pick(choose, dict(list(LINES.items())[:(4, 6, 7, 7)[w.wild]]))
            line = choose.choice(templates).format(v=v, u="u" + v, a=choose.choice(weights + local[:p.takes] if steps else known), b=choose.choice(known))
            line = around.format(line)
            if "ck(" in line and any(word in code for code in (*p.body, *(code for _, code in w.made)) for word in ("chunk(", "split(", "no_grad")):  # of a view that a write spoils
                continue
            p.gives = ["None"]
            p.body.append(line)
            if run_quietly(w, [f"r = {p.call(first)}"])[0][1] and choose.random() < 0.97:
                p.body.pop()
            elif f"{v} = " in line or f"{v}, " in line:
                local.append(v)
        p.gives = [choose.choice([*4 * local[p.takes:], *local, *(name for name, _ in w.made)]) for _ in range(choose.randrange(1, 4))]

    def write_events(self, first):
        choose, w = self.choose, self.world
        results, calls = [], 0
        made = [name for name, _ in w.made]
        weights = [name for name in made if name[0] == "w"]
        races = any(word in line for p in w.programs for line in p.body for word in ("dropout", "rand", "uniform", "jvp"))  # generators, and levels of dual numbers, are the process's
        for n in range(choose.randrange(3, 14)):
            is_call = not calls or choose.random() < 0.4
            happens = EVENTS[HOOKS] if w.wild == 3 and not is_call and choose.random() < 0.5 else pick(choose, CALLS if is_call else EVENTS)
            template = choose.choice(happens) if calls else "{r} = {call}"
            if "together" in template and (w.wild or races):  # what would come of it follows from which thread is first
                continue
            # Documented (docs/differences.md): a checkpoint's function that writes over what a gradient needs, or stops early and leaves a write or a freeze undone, or finds another tensor by then.
            if "ck(" in template and any(word in line for p in w.programs for line in p.body for word in WRITES):
                continue
            if template.startswith(("{a} = ", "{w} = ")) and any("ck(" in line for line in (*w.events, *(line for p in w.programs for line in p.body))):
                continue
            if "{r}" in template and not is_call and not results:
                continue
            p = choose.choice(w.programs)
            given = [g if choose.random() < 0.6 else choose.choice(made) if choose.random() < 0.4 else self.fresh([*SIZES, "5, 3", "1, 3", "6, 3"]) for g in first[p.name]]
            event = template.format(call=p.call(given), r=f"r{n}" if is_call else choose.choice(results or [""]), r2=choose.choice(results or [""]), a=choose.choice(made), b=choose.choice(made), w=choose.choice(weights), n=n)
            w.events.append(event)
            raised = run_quietly(w, w.events)[len(w.events) - 1][1]
            if raised and choose.random() < 0.8:
                w.events.pop()
            elif is_call and not raised:
                calls += 1
                results += [f"r{n}_{i}" for i, g in enumerate(p.gives) if g != "None"]


def run_quietly(world, events):
    return run(dataclasses.replace(world, events=events), False)


def without(items, i):
    return [x for k, x in enumerate(items) if k != i]


def shorter(world):
    """The worlds that have one line less."""
    for part in ("events", "made"):
        for i in reversed(range(len(getattr(world, part)))):
            yield dataclasses.replace(world, **{part: without(getattr(world, part), i)})
    for k, p in enumerate(world.programs):
        for part in ("body", "gives"):
            for i in reversed(range(len(getattr(p, part)))):
                programs = copy.copy(world.programs)
                programs[k] = dataclasses.replace(p, **{part: without(getattr(p, part), i) or ["None"] * (part == "gives")})
                if programs[k] != p:
                    yield dataclasses.replace(world, programs=programs)


def shortest(world):
    """The world without what it differs without."""
    def differs(w):
        try:
            return judge(w) is not None
        except Exception:
            return False
    while fewer := next(filter(differs, shorter(world)), None):
        world = fewer
    return world


def one(task, tell=lambda at: None):
    """What came of it: how many calls ran compiled, and what differs."""
    import vitrify
    tell(0)
    world = Maker(task["seed"]).make()
    before = dict(vitrify.counters)
    try:
        message = judge(world, tell)
        did = {k: vitrify.counters[k] - before[k] for k in ("compiled_calls", "eager_calls", "kernels_launched")}
        if message and task.get("reduce"):
            world = shortest(world)
            message = judge(world)
    except Exception:
        message, did = "the test itself: " + traceback.format_exc(limit=-4), {}
    vitrify.reset()
    return {"seed": task["seed"], "kind": "failed" if message else "passed", "message": message, "program": world.describe() if message else "", **did}


def said_of(result):
    return result["message"] if result["kind"] == "failed" else f"{result['kind']}: {result['reason']}"


def verdict(args, results, seconds):
    """A line, the report, and whether all is well."""
    total = collections.Counter()
    for r in results:
        total.update({k: r.get(k, 0) for k in ("compiled_calls", "eager_calls", "kernels_launched")})
        total[r["kind"]] += 1
    line = (f"{len(results)} worlds from seed {args.seed}: {total['failed']} differ, {total['left']} left where eager itself ended the process; {total['compiled_calls']} calls compiled, {total['eager_calls']} eager, "
            f"{total['kernels_launched']} kernels ({seconds:.0f} s)")
    rows = [("commit", provenance.commit_of(args)), ("processor", provenance.processor()), ("date", time.strftime("%Y-%m-%d", time.gmtime())), ("command", f"`tests/fuzz/worlds.py --n {args.n} --seed {args.seed}`")]
    listed = "".join(f"\n## seed {r['seed']}\n\n{said_of(r)}\n\n```python\n{r['program']}```\n" for r in results if r["kind"] != "passed")
    text = f"# Random worlds, compiled beside eager\n\n{report.table(('', ''), rows)}\n\n{line}.\n{listed}"
    calls = total["compiled_calls"] + total["eager_calls"]
    native = total["eager_calls"] <= EAGER * calls and total["kernels_launched"] > len(results) // 2
    return line, text, not total["failed"] and total["left"] <= LEFT * len(results) and native and len(results) == args.n


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("n", 200), ("seed", 0), ("jobs", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("print", "reduce"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--report", type=Path)
    parser.add_argument("--commit", help="of the engine; else git's")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one world; more is a failure")
    args = parser.parse_args(argv)
    if args.print:
        for seed in range(args.seed, args.seed + args.n):
            print(Maker(seed).make().describe())
        return 0

    def told(process, task, result):
        if result["kind"] != "passed":
            print(f"seed {result['seed']}: {said_of(result)}\n{result['program']}", flush=True)
    begin = time.time()
    tasks = [{"seed": seed, "reduce": args.reduce} for seed in range(args.seed, args.seed + args.n)]
    results = worker.each(tasks, args.jobs, lambda: worker.Process(args.limit, __file__), told)
    line, text, passed = verdict(args, results, time.time() - begin)
    print(line)
    if args.report:
        args.report.write_text(text)
    return 0 if passed else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        worker.serve(one)
    else:
        sys.exit(main())
