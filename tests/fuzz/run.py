"""Random programs, compiled beside eager. A failure prints its seed and its program; --seed S --n 1 runs it again, --reduce makes it shorter.

run.py [--training] [--n N] [--seed S] [--length L] [--jobs J] [--print] [--reduce] [--report FILE.md] [--json FILE] [--commit C] [--limit SECONDS]"""
from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
import warnings
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
sys.path.append(str(HERE.parent.parent))  # after PYTHONPATH, which may name a package built for another torch

import compile_times  # noqa: E402
import reduce  # noqa: E402
import report  # noqa: E402
import worker  # noqa: E402


def parse(argv):
    parser = argparse.ArgumentParser(prog="./x fuzz", formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--training", action="store_true", help="programs in grad mode, with what is done with their gradients")
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=12, help="lines of a program, at most")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--print", action="store_true", help="print every program")
    parser.add_argument("--reduce", action="store_true", help="print each failing program without the lines and calls that it fails without")
    parser.add_argument("--report", type=Path, help="write the verdict here")
    parser.add_argument("--json", type=Path, help="write what is known of each program here")
    parser.add_argument("--commit", help="of the engine; else git's")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one program; more is a failure")
    return parser.parse_args(argv)


def task_of(seed, args):
    return {"seed": seed, "length": 1 + seed % args.length, "training": args.training, "describe": args.print}


def compile_alone(results, args):
    """What compiled slowly beside the others is made once more with nothing beside it: how long that takes is the compiler's, and not the machine's."""
    slow = {name for name, *_ in compile_times.outliers(report.compiles(results))}
    process = worker.Process(args.limit)
    for r in results:
        if report.name_of(r) in slow:
            r["compile_s"] = min(r["compile_s"], process.do(task_of(r["seed"], args)).get("compile_s", r["compile_s"]))
    process.close()


def run(args):
    """The results, in order of seeds; prints those that differ."""
    kinds = collections.Counter()

    def told(process, task, result):
        kinds[result["kind"]] += 1
        tell(result, args)
        if kinds.total() % 100 == 0:
            print(f"{kinds.total()} of {args.n} programs: {dict(kinds)}", flush=True)
        if args.reduce and result["kind"] == "failed":
            short = reduce.shortest(process, task, result)
            print(f"seed {task['seed']}, reduced: {short['message']}\n{short['program']}", flush=True)
    tasks = [task_of(seed, args) for seed in range(args.seed, args.seed + args.n)]
    return worker.each(tasks, args.jobs, lambda: worker.Process(args.limit), told)


def tell(result, args):
    if args.print and result["kind"] != "failed":
        print(result["program"], flush=True)
    if result["kind"] == "failed":
        print(f"seed {result['seed']}: {result['message']}\n{result['program']}", flush=True)
    elif result["kind"] in ("eager", "left", "inconclusive"):
        print(f"seed {result['seed']}: {result['kind']}: {result['reason']}", flush=True)


def main(argv=None):
    args, start = parse(argv), time.time()
    os.environ.setdefault("VITRIFY_VERIFY", "1")  # what is wrong inside is an internal error then, and not whatever LLVM makes of it
    warnings.simplefilter("ignore")
    results = run(args)
    compile_alone(results, args)
    verdict = report.Verdict(args, results, time.time() - start)
    if args.json:
        args.json.write_text(json.dumps([{k: v for k, v in r.items() if k != "program"} for r in results], indent=0))
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.write_text(verdict.text())
    print(verdict.line())
    return 0 if verdict.passed else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        worker.serve()
    else:
        raise SystemExit(main())
