"""Random programs of fixed seeds on every run; ./x fuzz runs as many as asked for. And the generators, the judge and the script themselves."""
import argparse
import dataclasses
import json
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parent))
import layers  # noqa: E402
import oracle  # noqa: E402
import program  # noqa: E402
import report  # noqa: E402
import run  # noqa: E402
import scope  # noqa: E402
import values  # noqa: E402
import worker  # noqa: E402
import worlds  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.judged("worker.one says of each program how it ran, and report.Verdict bounds what did not run compiled")]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def task(seed, training, **more):
    return {"seed": seed, "length": 1 + seed % 12, "training": training} | more


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_programs(training, block):
    results = [worker.one(task(seed, training)) for seed in range(24 * block, 24 * (block + 1))]
    failed = [r for r in results if r["kind"] == "failed"]
    assert not failed, "\n".join(f"seed {r['seed']}: {r['message']}\n{r['program']}" for r in failed)
    assert sum(r["kind"] in ("ok", "library") for r in results) >= len(results) // 2
    for kind in ("eager", "left", "inconclusive"):  # of so few at most one in twelve; report.Verdict bounds those of many
        assert sum(r["kind"] == kind for r in results) <= 2, [r for r in results if r["kind"] == kind]


def test_same_seed_same_program():
    assert program.Program(7, 12).describe() == program.Program(7, 12).describe()


def test_what_asks_for_much_memory_is_no_line():
    """A machine with memory for it would compute for minutes, and one without it makes another program."""
    grower = program.Grower(random.Random(0), program.THEMES["large"], [values.Spec((30000,), "F32"), values.Spec((1,), "I64")], False)
    grower.attempt("v0 = (x0[:, None] - x0).sum()", "v0", "x0", None, "m0")
    assert grower.body.lines == []
    grower.attempt("v0 = (x0 - x0).sum()", "v0", "x0", None, "m0")
    assert grower.body.lines == ["v0 = (x0 - x0).sum()"]
    torch.empty(scope.LINE + 1, dtype=torch.uint8)  # the bound is a line's


def test_a_call_that_asks_for_much_memory_is_no_call():
    """Arguments of other sizes can make a small line a large one."""
    p = program.Program(7, 12)
    p.calls = [p.calls[0], dataclasses.replace(p.calls[0], driver=f"out = torch.zeros({2 * scope.LINE}, dtype=torch.bool)")]
    p.seed, p.raises = 11, False  # of such seeds some of what raises is kept
    assert p.settle(oracle.errors_of)
    assert len(p.calls) == 1


def test_zeros_without_memory_are_not_read():
    """Some derivatives make them, with no numbers to look at."""
    with oracle.Watch() as watch:
        made = torch._efficientzerotensor((64, 40, 100), dtype=torch.bfloat16).detach()
    assert made._is_zerotensor() and not watch.draws and len(watch.made) == 1


def test_programs_vary():
    programs = [program.Program(seed, 12) for seed in range(110)]
    text = "\n".join(p.describe() for p in programs)
    for part in ("sum(", "transpose(", "add_(", "cat(", " @ ", "nn.Conv2d", "scaled_dot_product", "out=", "_foreach", "torch.fft", "linalg", "nonzero", "'U8'", "'F16'", "'C64'", "layout='windows'", "threads=",
                 "inference", "autocast", "register_buffer", ".data", "as_strided", "late = ", "generator=", "ops.fuzz"):
        assert part in text, part
    assert {p.theme for p in programs} == set(program.THEMES)
    assert any(any(s.view for s in c.specs or ()) for p in programs for c in p.calls)


def test_programs_have_gradients():
    text = "\n".join(program.Program(seed, 12, training=True).describe() for seed in range(110))
    for part in ("create_graph=True", "checkpoint(", "customs.", "retain_graph=True", "register_hook", "optim.SGD", "is_grads_batched", "accumulate", "the same arguments again", "autocast", "no_grad()"):
        assert part in text, part


def each(out, what):
    return {k: what(t) for k, t in out.items()} if isinstance(out, dict) else type(out)(what(t) for t in out)


def found(compile, training, seeds, monkeypatch, **more):
    monkeypatch.setattr(vitrify, "compile", compile)
    results = [worker.one(task(seed, training, **more)) for seed in seeds]
    return [r["message"] for r in results if r["kind"] == "failed"]


def test_a_wrong_engine_is_found(monkeypatch):
    """An engine that computes something else for one op is caught within a few programs."""
    def broken(fn, **_):
        def run(*args):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "tanh", lambda x: torch.atan(x))
                patch.setattr(torch, "abs", lambda x: torch.square(x))
                return fn(*args)
        return run
    assert len(found(broken, False, range(24), monkeypatch, theme="classic")) >= 3


def test_a_wrong_gradient_is_found(monkeypatch):
    """A derivative that is off by a thousandth is caught within a few programs."""
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.view_as(t)

        @staticmethod
        def backward(ctx, g):
            return g * 1.001
    wrong = found(lambda fn, **_: lambda *args: fn(*(Off.apply(a) if a.requires_grad else a for a in args)), True, range(8), monkeypatch, theme="classic", length=4)
    assert len(wrong) >= 2


@pytest.mark.parametrize("what, says", [
    (lambda out: each(out, lambda t: t.contiguous() + 0), "aliasing|strides|differ"),
    (lambda out: (torch.rand(1), out)[1], "random state"),
    (lambda out: each(out, lambda t: t.double()), "dtype"),
], ids=["copies", "random numbers", "dtypes"])
def test_a_broken_promise_is_found(monkeypatch, what, says):
    messages = found(lambda fn, **_: lambda *args: what(fn(*args)), False, range(12), monkeypatch, theme="views")
    assert len(messages) >= 2
    assert any(re.search(says, m) for m in messages), messages


def test_versions_are_compared(monkeypatch):
    messages = found(lambda fn, **_: lambda *args: (args[0].add_(0) if not args[0].is_inference() else None, fn(*args))[1], False, range(12), monkeypatch, theme="classic")
    assert any("versions moved" in m for m in messages)


@pytest.mark.parametrize("wrong, first", [(oracle.Mismatch("strides"), 0), (oracle.InternalError("within"), 0), (oracle.OfValues("out[0]"), 1)], ids=["strides", "internal", "values"])
def test_where_a_leaf_means_nothing_only_numbers_are_set_aside(monkeypatch, wrong, first):
    def check(p, reference):
        if p.attempt == 0:
            raise wrong
        raise oracle.Mismatch("the next attempt")
    monkeypatch.setattr(oracle, "check", check)
    monkeypatch.setattr(oracle.Reference, "meaningless", lambda self: [(0, "out[1]")])
    r = worker.one(task(3, False))
    assert (r["kind"], r["attempt"], r["aside"]) == ("failed", first, ["out[0]"] * first)


def result(**more):
    return {"seed": 0, "theme": "mixed", "kind": "ok", "compiled_values": 10, "compile_s": 0.01, **more}


def verdict(results, n=None):
    return report.Verdict(argparse.Namespace(seed=0, n=len(results) if n is None else n, length=12, jobs=1, training=False, commit="c0ffee"), results, 1.0)


def test_verdict():
    good = [result() for _ in range(200)]
    assert verdict(good).passed and "c0ffee" in verdict(good).text()
    for bad in ([result(kind="failed", message="values differ")], [result(kind="inconclusive", reason="out")] * 3, [result(kind="eager", reason="vitrify: f runs eagerly: calls x")] * 6, [result(compile_s=0.3)]):
        v = verdict(good + bad)
        assert not v.passed and "Failed" in v.text() and "FAILED" in v.line()
    assert verdict([*good, result(aside=["values"] * 10)]).passed and "10 set aside" in verdict([*good, result(aside=["values"] * 10)]).line()
    assert not verdict([*good, result(aside=["values"] * 12)]).passed
    for kind in ("raises", "library"):
        assert not verdict([result(kind=kind) for _ in range(200)]).passed
    assert not verdict(good, n=201).passed


@pytest.mark.parametrize("alone, passes", [(0.02, True), (0.31, False)])
def test_slow_compiles_are_made_again_alone(monkeypatch, alone, passes):
    made = []
    monkeypatch.setattr(run.worker, "Process", lambda limit: argparse.Namespace(do=lambda task: made.append(task["seed"]) or {"compile_s": alone}, close=lambda: None))
    results = [result(seed=i) for i in range(200)] + [result(seed=200, compile_s=0.3)]
    run.compile_alone(results, argparse.Namespace(limit=1, length=12, training=False, print=False))
    assert made == [200] and verdict(results).passed == passes


def test_a_crash_and_a_hang_are_failures(monkeypatch):
    """The worker ends or hangs: that program fails, the next one has a new worker."""
    process = worker.Process(limit=60)
    try:
        process.start()
        first = process.process
        first.kill()
        assert process.do(task(1, False))["kind"] == "failed"
        assert process.do(task(1, False))["kind"] != "failed" and process.process is not first
        process.limit = 0.0
        gone = process.do(task(2, False))
        assert gone["kind"] == "failed" and "no end within" in gone["message"]
    finally:
        process.close()


class Ends(worker.Process):
    """A worker that says so much, and then its process ends."""

    def __init__(self, *says):
        super().__init__(limit=60)
        self.says = [json.dumps({"at": at}) for at in says]

    def start(self):
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([sys.executable, "-c", f"import os, sys; sys.stdin.readline(); print(*{self.says!r}, sep='\\n', flush=True); os.kill(os.getpid(), 8)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines, self.done = queue.Queue(), 0
        threading.Thread(target=self.listen, args=(self.process, self.lines), daemon=True).start()


def test_a_crash_of_eager_is_left():
    """While it makes a program or runs one, which nobody else makes to tell of it."""
    at = {"seed": 5, "program": "def program", "calls": 1}
    made, ours = Ends(None).do(task(5, True)), Ends(None, at).do(task(5, True))
    assert made["kind"] == Ends(at, None).do(task(5, True))["kind"] == "left" and made["seed"] == 5 and "eager itself" in made["reason"]
    assert ours["kind"] == "failed" and ours["program"] == "def program" and "ended with -8" in ours["message"]
    assert verdict([result(), made]).counts["left"] == 1 and "eager itself" in verdict([result(), made]).text()
    behind = at | {"theme": "classic"}  # it is run alone: there it ends again, or not
    assert Ends(behind, None).do(task(5, True))["kind"] == "left"
    said = []
    alone = worker.one(task(5, True) | {"alone": 2}, said.append)
    assert alone["kind"] == "failed" and "nothing compiled ran before" in alone["message"]
    assert [at for at in said if isinstance(at, int)] == [0, 1, 2]  # it may end in what is made after the last program that was told of


def test_attention_without_heads_is_not_made():
    assert all(not layers.FAMILIES[family][1](torch.ones(2, 0, 4, 8)) and layers.FAMILIES[family][1](torch.ones(2, 1, 4, 8)) for family in ("attention", "autocast"))


@pytest.mark.parametrize("block", range(3))
def test_worlds(block):
    results = [worlds.one({"seed": seed}) for seed in range(40 * block, 40 * (block + 1))]
    failed = [r for r in results if r["message"]]
    assert not failed, "\n".join(f"seed {r['seed']}: {r['message']}\n{r['program']}" for r in failed)
    assert sum(r["compiled_calls"] for r in results) > sum(r["eager_calls"] for r in results) and sum(r["kernels_launched"] for r in results) > len(results) // 2


@pytest.mark.slow
def test_worlds_vary():
    text = "\n".join(worlds.Maker(seed).make().describe() for seed in range(300))
    for part in ("net.", "def f1", "b['in']", "xs.values()", "Cube", "Exp", "Doubled", "Rounded", "Pair", "vmap", "jvp", "together(", "copied()", "load_state_dict", "multi_grad", "prehook", "Adam", "dropout", "opt.step()", ".backward()", "create_graph", "hook(", "requires_grad_", ".grad = ", ".data", "no_grad", "inference_mode", "ck(", "elsewhere(", "chunk", "expand", "nn.Parameter(w"):
        assert part in text, part


def test_worlds_that_differ_are_seen(monkeypatch):
    """A program whose second call gives what the first gave."""
    def stale(f, dynamic=None):
        made = []
        return lambda *args: made[0] if made else made.append(f(*args)) or made[0]
    monkeypatch.setattr(vitrify, "compile", stale)
    found = [r for seed in range(20) if (r := worlds.one({"seed": seed}))["message"]]
    assert len(found) > 10
    world = worlds.Maker(found[0]["seed"]).make()
    short = worlds.shortest(world)
    assert worlds.judge(short) and len(short.events) <= len(world.events)
