"""Two built checkouts beside each other, network by network and in turns: what a change costs.

trees.py BEFORE AFTER [--models a,b] [--processes N] [--seconds S] [--firsts N] [--report FILE]     prints medians of calls, steps and first ones, and how many times BEFORE's AFTER's take

A process per tree holds the network; two take turns, and the one that waits computes nothing."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

NETWORKS = "resnet18,resnet50,vit_s,bert,gpt2,llama,sage,gat,actor_critic,norms"
TURN = 0.1  # seconds of one side's turn, or one call where that is longer


class Side:
    """A tree's process, which answers each line with one of JSON."""

    def __init__(self, tree, model, size):
        self.process = subprocess.Popen([sys.executable, __file__, "--worker", model, size], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=os.environ | {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "OMP_WAIT_POLICY": "passive"})
        self.machine = self.ask("machine")

    def ask(self, what):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of a tree ended at {what!r} with {self.process.wait()}")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def worker(model, size):
    import torch
    import vitrify
    from vitrify import measure, networks
    assert Path(vitrify.__file__).parents[1] == Path(os.environ["PYTHONPATH"]), f"vitrify comes from {vitrify.__file__}"

    def make(what, compiled):
        module, inputs = networks.build(model, size)
        if what == "step":
            module.train()
        run = vitrify.compile(module) if compiled else module

        def call():
            with torch.no_grad():
                run(*inputs)

        def step():
            module.zero_grad()
            networks.loss(model, run(*inputs), inputs).backward()
        return call if what == "call" else step
    eager, steady = {}, {}
    for line in sys.stdin:
        kind, what, *n = [*line.split(), ""]
        if kind == "machine":
            answer = measure.machine()
        elif kind == "eager":
            run = make(what, False)
            run()
            answer = eager[what] = statistics.median(measure.once(run) for _ in range(3))
        elif kind == "first":  # above eager's: of nothing that is kept from before
            vitrify.reset()
            steady[what] = make(what, True)
            answer = measure.once(steady[what]) - eager[what]
        else:
            end, answer = time.perf_counter() + float(n[0]), []
            while not answer or time.perf_counter() < end:
                answer.append(measure.once(steady[what]))
        print(json.dumps(answer), flush=True)


def commit(tree):
    return subprocess.run(["git", "-C", str(tree), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def main():
    if sys.argv[1:2] == ["--worker"]:
        return worker(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs=2, type=Path)
    parser.add_argument("--models", default=NETWORKS)
    parser.add_argument("--size", default="s")
    parser.add_argument("--processes", type=int, default=3, help="of each side, one after the other: where memory lies differs between processes, and times with it")
    parser.add_argument("--seconds", type=float, default=2, help="of each process, of calls and again of steps")
    parser.add_argument("--firsts", type=int, default=3, help="first calls and first steps of each process")
    parser.add_argument("--verbose", action="store_true", help="each process's median as well")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    trees = [t.resolve() for t in args.trees]
    lines, ratios = [], {}

    def say(line):
        lines.append(line)
        print(line, flush=True)
    for model in args.models.split(","):
        eager, firsts, taken = ({what: ([], []) for what in ("call", "step")} for _ in range(3))
        for _ in range(args.processes):
            sides = [Side(t, model, args.size) for t in trees]
            for what in eager:
                for n in range(args.firsts):
                    for side in (0, 1) if n % 2 == 0 else (1, 0):
                        if n == 0:
                            eager[what][side].append(sides[side].ask(f"eager {what}"))
                        firsts[what][side].append(sides[side].ask(f"first {what}"))
                times, turn = ([], []), 0
                while min(map(sum, times)) < args.seconds:
                    for side in (0, 1) if turn % 2 == 0 else (1, 0):
                        times[side].extend(sides[side].ask(f"steady {what} {TURN}"))
                    turn += 1
                for side in (0, 1):
                    taken[what][side].append(statistics.median(times[side]))
            for s in sides:
                s.close()
        if not lines:
            machine = sides[0].machine
            say(f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}; before {commit(trees[0])}, after {commit(trees[1])}; {args.processes} processes of each, in turns\n")
            say("| network | | eager | before | after | after / before | first before | first after |\n|---|---|--:|--:|--:|--:|--:|--:|")
        for what in eager:
            before, after = map(statistics.median, taken[what])
            ratio = statistics.median(b / a for a, b in zip(*taken[what]))  # of two processes that took turns: the machine's speed is that of both
            first = [1e3 * statistics.median(f) for f in firsts[what]]
            ratios.setdefault(what, []).append(ratio)
            say(f"| {model} | {what} | {1e3 * statistics.median(sum(eager[what], [])):.3f} | {before * 1e3:.3f} | {1e3 * after:.3f} | {ratio:.3f} | {first[0]:.0f} | {first[1]:.0f} |")
            if args.verbose:
                print("   ", *("  ".join(f"{1e3 * t:.3f}" for t in side) + ";" for side in taken[what]), flush=True)
    say("")
    for what, r in ratios.items():
        say(f"{what}: geometric mean of after / before {statistics.geometric_mean(r):.3f}")
    say("Milliseconds; first: above eager's. A step: forward, loss, backward.")
    if args.report:
        args.report.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
