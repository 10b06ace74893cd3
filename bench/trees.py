"""Two built checkouts beside each other, network by network and in turns: what a change costs.

trees.py BEFORE AFTER [--models a,b] [--rounds N] [--seconds S] [--report FILE]     prints medians of calls, steps and first ones, and how many times BEFORE's AFTER's take"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

COLUMNS = ("compiled_ms", "first_ms", "eager_ms")


def measure(tree, model, seconds):
    """{(network, "call" or "step"): {column: milliseconds}}"""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        subprocess.run([sys.executable, "-m", "vitrify", "demo", "--models", model, "--seconds", str(seconds), "--json", str(out)], check=True, stdout=subprocess.DEVNULL,
                       env=os.environ | {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}, cwd=folder)
        found = json.loads(out.read_text())
    return found["machine"], {(r["network"], what): {c: r[c] for c in COLUMNS} for what, rows in (("call", found["rows"]), ("step", found["training"])) for r in rows}


def commit(tree):
    return subprocess.run(["git", "-C", str(tree), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs=2, type=Path)
    parser.add_argument("--models", default="resnet18,resnet50,vit_s,bert,gpt2,llama,sage,gat,actor_critic,norms")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    trees = [t.resolve() for t in args.trees]
    taken = {}
    for model in args.models.split(","):
        for n in range(args.rounds):
            for side in (0, 1) if n % 2 == 0 else (1, 0):
                machine, rows = measure(trees[side], model, args.seconds)
                for row, columns in rows.items():
                    for c, ms in columns.items():
                        taken.setdefault((row, c), ([], []))[side].append(ms)
    lines = [f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}; before {commit(trees[0])}, after {commit(trees[1])}; medians of {args.rounds} processes each, in turns", "",
             "| network | | eager | before | after | after / before | first before | first after |", "|---|---|--:|--:|--:|--:|--:|--:|"]
    ratios = {}
    for row in dict.fromkeys(r for r, _ in taken):
        of = {c: [statistics.median(side) for side in taken[row, c]] for c in COLUMNS}
        before, after = of["compiled_ms"]
        ratios.setdefault(row[1], []).append(after / before)
        first = of["first_ms"]
        lines.append(f"| {row[0]} | {row[1]} | {statistics.median(of['eager_ms']):.3f} | {before:.3f} | {after:.3f} | {after / before:.3f} | {first[0]:.0f} | {first[1]:.0f} |")
    lines += ["", *(f"{what}: geometric mean of after / before {statistics.geometric_mean(r):.3f}" for what, r in ratios.items()), "Milliseconds; first: above eager's."]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.report:
        args.report.write_text(text)


if __name__ == "__main__":
    main()
