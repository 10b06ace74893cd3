"""All ops of torch's op database, compiled beside eager, in worker processes (an op that crashes one is a row like any other).

run_opinfo.py [--grad [ORDER]] [--ops REGEX] [--dtypes a,b] [--samples N] [--shard I/N] [--jobs N] [--limit SECONDS] [--report FILE] [--reasons] [--autocast] [--json FILE] [--merge JSON...]
"""
from __future__ import annotations

import argparse
import faulthandler
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
sys.path.append(str(HERE.parent.parent))  # after PYTHONPATH, which may name a package built for another torch

import compile_times  # noqa: E402
import provenance  # noqa: E402


def worker(args):
    faulthandler.enable()
    import torch
    import compare
    import opinfo
    import opinfo_grad
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore")
    compare.internal_errors_raise()
    known = {}
    for op in opinfo.database():
        known.setdefault(opinfo.name_of(op), op)
    opinfo.autocast = args.autocast
    compile_times.leave_out_what_is_there()
    for line in sys.stdin:
        name = line.strip()
        order = {"order": args.grad} if args.grad else {}
        result = (opinfo_grad if args.grad else opinfo).run_op(known[name], args.dtypes.split(","), args.samples, **order)
        print("RESULT " + json.dumps(result.json()), flush=True)


def tail_of(text):
    """What a worker said at its end: from where the fault handler reports, or its last lines."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    fatal = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines) - 9)
    return " / ".join(lines[max(0, fatal - 3):])[:1500] or "nothing on its standard error"


def serve(names, args, deadline, done):
    """Feeds one worker after another: a new one when it died."""
    import queue
    import threading
    process = lines = errors = None

    def ended(what):
        code = process.wait()
        errors.seek(0)
        return {"op": name, "failures": [f"{what} (exit {code}, after {', '.join(ran[-3:]) or 'no other op'}): {tail_of(errors.read())}"], "samples": 1, "passed": 0}
    while True:
        try:
            name = names.get_nowait()
        except queue.Empty:
            break
        if time.time() > deadline:
            done({"op": name, "failures": ["not run: time limit"], "samples": 0, "passed": 0, "skipped": True})
            continue
        if process is None:
            errors = tempfile.TemporaryFile("w+", errors="replace")
            process = subprocess.Popen([sys.executable, __file__, "--worker", "--dtypes", args.dtypes, "--samples", str(args.samples), "--threads", str(args.threads), "--grad", str(args.grad), *["--autocast"] * args.autocast],
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
            lines, ran = queue.Queue(), []

            def pump(stream=process.stdout, into=lines):
                for line in stream:
                    into.put(line)
                into.put(None)
            threading.Thread(target=pump, daemon=True).start()
        result = None
        try:
            process.stdin.write(name + "\n")
            process.stdin.flush()
            end = time.time() + args.op_limit
            while result is None:
                line = lines.get(timeout=max(0.1, end - time.time()))
                if line is None:
                    result = ended("crashed the process")
                elif line.startswith("RESULT "):
                    result = json.loads(line[7:])
        except queue.Empty:
            process.send_signal(signal.SIGABRT)  # prints where it is
            result = ended(f"no end in {args.op_limit:.0f} s")
        except OSError:
            result = ended("crashed the process")
        ran.append(name)
        if process.poll() is not None:
            process = None
        done(result)
    if process is not None:
        process.stdin.close()
        process.wait()


def report(rows, args, seconds) -> str:
    import torch
    if args.grad:
        rows = [r for r in rows if r["samples"] or r["failures"]]  # those that have a gradient
    columns = ("native", "mixed", "extern", "fallback", "views", "errors", "unclear")
    total = {c: sum(r.get(c, 0) for r in rows) for c in ("samples", "passed", *columns)}
    clean = sum(not r["failures"] for r in rows)
    flag, file, what, order = [("", "opinfo-report.md", "compiled", "no grad"), (" --grad", "opinfo-grad-report.md", "gradients", "first order"),
                               (" --grad 2", "opinfo-grad2-report.md", "gradients of gradients", "second order")][args.grad]
    compared = ("Compared: value of results and gradients (the accuracy rule against fp64), dtype, shape, strides, which results need gradients, which gradients are None, type of the exception."
                if args.grad else "Compared: value (the accuracy rule against fp64; integers bitwise), dtype, shape, strides, aliasing, mutation, type of the exception.")
    out = [f"# torch's op database, {what} beside eager", "",
           f"Commit {provenance.commit_of(args)}, {provenance.processor()}. Written by `tests/ops/run_opinfo.py{flag} --samples {args.samples} --report docs/{file}` (in shards: `--json`, then `--merge`) on torch {torch.__version__}, CPU, {order}, dtypes {args.dtypes}, at most {args.samples} samples of an op and dtype.",
           compared, "",
           f"**{clean} of {len(rows)} ops without a difference; {total['passed']} of {total['samples']} samples pass**{f' ({seconds:.0f} s)' if seconds else ''}.",
           "Samples by how they ran: " + ", ".join(f"{total[c]} {c}" for c in columns) + ".", "",
           f"native: generated kernels only; mixed: kernels and extern calls; extern: ATen calls only; fallback: eager, wholly or after a break; views: nothing to run; errors: samples and error inputs that raise as in eager; unclear, of these: a result differs where eager's own moves with a rounding ({UNCLEAR:.0%} of the samples at most). A sample that runs eagerly is a failure, but for what eager must run, op by op and with the reason that the engine gives (`EAGER` in `tests/ops/opinfo.py`).", "",
           "| op | samples | passed | " + " | ".join(columns) + " | first difference |", "|---|--:|--:|" + "--:|" * len(columns) + "---|"]
    for r in sorted(rows, key=lambda r: (not r["failures"], r["op"])):
        first = r["failures"][0].replace("|", "\\|").replace("\n", " ")[:160] if r["failures"] else ""
        out.append(f"| {r['op']} | {r['samples']} | {r['passed']} | " + " | ".join(str(r.get(c, 0)) for c in columns) + f" | {first} |")
    records = compiles(rows)
    out += ["", "## Compile times", "", f"Of a sample's graphs together, by their nodes. Over {compile_times.FACTOR} times the median of its size:", "",
            *([f"* {name}: {nodes} nodes, {s:.2f} s, median {median:.3f} s" for name, nodes, s, median in compile_times.outliers(records)] or ["* none"]), "", compile_times.table(records)]
    return "\n".join(out) + "\n"


UNCLEAR = 0.01  # of the samples


def passed(rows, wanted) -> bool:
    """Every op ran, without a difference, and what says nothing is rare."""
    ran = {r["op"] for r in rows if not r.get("skipped")}
    for name in wanted:
        if name not in ran:
            print(f"{name}: not run")
    samples, unclear = (sum(r.get(c, 0) for r in rows) for c in ("samples", "unclear"))
    if unclear > UNCLEAR * samples:
        print(f"{unclear} of {samples} samples say nothing")
    return ran >= set(wanted) and unclear <= UNCLEAR * samples and not any(r["failures"] for r in rows) and not compile_times.outliers(compiles(rows))


def compiles(rows):
    return [(f"{r['op']} {label}", nodes, s) for r in rows for label, nodes, s in r.get("compiles", [])]


def reasons(rows) -> str:
    """Why samples ran eagerly, the most frequent first, with the ops."""
    by_reason: dict[str, dict[str, int]] = {}
    for r in rows:
        for why, n in r.get("reasons", {}).items():
            by_reason.setdefault(why, {})[r["op"]] = n
    lines = []
    for why, ops in sorted(by_reason.items(), key=lambda x: -sum(x[1].values())):
        named = ", ".join(f"{op} {n}" for op, n in sorted(ops.items(), key=lambda x: -x[1]))
        lines.append(f"{sum(ops.values()):6} {why[:140]}\n       {named}")
    return "\n".join(lines)


def main():
    import queue
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=".", help="regular expression on the names")
    parser.add_argument("--grad", type=int, nargs="?", const=1, default=0, choices=[0, 1, 2], metavar="ORDER", help="gradients, of the first order or the second")
    parser.add_argument("--dtypes", help="default: float32,int64,bool,bfloat16; of gradients float32,float64; of the second order float64")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=3600, help="seconds for everything")
    parser.add_argument("--op-limit", type=float, default=120, help="seconds for one op")
    parser.add_argument("--commit", help="of the engine; else git's")
    parser.add_argument("--report", help="markdown table, docs/opinfo-report.md in the tree")
    parser.add_argument("--reasons", action="store_true", help="print why samples ran eagerly, by op")
    parser.add_argument("--autocast", action="store_true", help="each op under autocast to bfloat16")
    parser.add_argument("--json")
    parser.add_argument("--merge", nargs="+", help="run nothing: the report of these --json files (shards; a later file's row of an op wins)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.dtypes = args.dtypes or ["float32,int64,bool,bfloat16", "float32,float64", "float64"][args.grad]
    if args.worker:
        return worker(args)
    import opinfo
    index, count = map(int, args.shard.split("/"))
    wanted = [n for n in dict.fromkeys(opinfo.name_of(op) for op in opinfo.database()) if re.search(args.ops, n)][index::count]
    if args.merge:
        merged = {}
        for file in args.merge:
            merged.update({row["op"]: row for row in json.loads(Path(file).read_text()) if not row.get("skipped")})
        text = report(list(merged.values()), args, 0)
        if args.report:
            Path(args.report).write_text(text)
        print(reasons(merged.values()) if args.reasons else text if not args.report else "\n".join(text.splitlines()[5:9]))
        return 0 if passed(list(merged.values()), wanted) else 1
    names: queue.Queue = queue.Queue()
    for name in wanted:
        names.put(name)
    rows, start = [], time.time()

    def done(row):
        rows.append(row)
        mark = "ok" if not row["failures"] else row["failures"][0][:1500]
        print(f"[{len(rows)}/{len(wanted)}] {row['op']}: {row['passed']}/{row['samples']} {mark}", flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        for future in [pool.submit(serve, names, args, start + args.limit, done) for _ in range(args.jobs)]:
            future.result()
    text = report(rows, args, time.time() - start)
    if args.report:
        Path(args.report).write_text(text)
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n")
    slow = compile_times.outliers(compiles(rows))
    print("\n".join(text.splitlines()[5:7]))
    for name, nodes, s, median in slow:
        print(f"{name}: {nodes} nodes compiled in {s:.2f} s, {s / median:.0f} times the median of its size")
    if args.reasons:
        print(reasons(rows))
    return 0 if passed(rows, wanted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
