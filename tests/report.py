"""The committed record of `./x test --all`: one row per part, merged into what docs/reports/all.md holds already.

report.py PART --begin                                                          its row says that it has not ended, and which commit it runs on
report.py PART --passed N --failed N --seconds S [--failures FILE]              it has ended
report.py --check                                                               fails where a part is missing, failed or of another commit
--report FILE: another file"""
import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # ./x forbids Python to look there by itself

import provenance  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "quick": "C++ tests, quick Python tests, layers, format",
    "slow": "slow Python tests, and a fault at every request of a compile and a run",
    "fuzz": "random programs: inference and training",
    "asan": "C++ tests and quick Python tests under asan and ubsan, and leaks",
    "tsan": "C++ tests with threads, parallel regions and kernels under tsan",
    "lane": "C++ tests and quick Python tests on the newest torch",
    "wheel": "the wheel, from outside the checkout",
    "cpp": "C++ examples built against an install prefix",
    "docs": "code in README and docs, Python and C++",
}
NOT_ENDED = "it has not ended"
ROW = re.compile(r"^\| (\w+) \| [^|]+ \| (\d+) \| (\d+) \| (\d+) \| (\S+) \| ([^|]+) \| ([^|]+) \|$", re.M)


def git(*args):
    return subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True).stdout.strip()


def commit():
    """The last commit that changed more than reports; "+" after it where the tree differs from it."""
    but_reports = (".", ":!docs/reports", ":!docs/opinfo*-report.md")
    return git("log", "-1", "--format=%h", "--abbrev=10", "--", *but_reports) + ("+" if git("status", "--porcelain", "--", *but_reports) else "")


def read(path):
    """part -> (passed, failed, seconds, commit, when, machine), and part -> names of failures."""
    text = path.read_text() if path.exists() else ""
    rows = {m[1]: (int(m[2]), int(m[3]), int(m[4]), m[5], m[6], m[7]) for m in ROW.finditer(text)}
    failures = {}
    for part, name in re.findall(r"^\* (\w+): (.*)$", text, re.M):
        failures.setdefault(part, []).append(name)
    return rows, failures


def text_of(rows, failures):
    commits = {row[3] for row in rows.values()}
    missing = [p for p in PARTS if p not in rows]
    failed = sum(row[1] for row in rows.values())
    state = [f"not run: {', '.join(missing)}"] * bool(missing) + [f"parts of {len(commits)} commits"] * (len(commits) > 1) + [f"{failed} failed"] * bool(failed)
    lines = ["# Everything that can be tested, run", "", "Written by `./x test --all` (its parts may run one by one: `--part slow,asan`).", "",
             f"**Commit {', '.join(sorted(commits))}: {sum(row[0] for row in rows.values())} passed, {failed} failed{' (' + '; '.join(state) + ')' if state else ''}.** A + after a commit: the tree had changes on top of it.",
             "", "| part | what | passed | failed | seconds | commit | when (UTC) | machine |", "|---|---|--:|--:|--:|---|---|---|"]
    lines += [f"| {p} | {PARTS[p]} | {rows[p][0]} | {rows[p][1]} | {rows[p][2]} | {rows[p][3]} | {rows[p][4]} | {rows[p][5]} |" for p in PARTS if p in rows]
    named = [f"* {p}: {name}" for p in PARTS for name in failures.get(p, [])]
    if named:
        lines += ["", "Failures:", "", *named]
    return "\n".join(lines) + "\n"


def finish(args, rows, failures, ran_on):
    names = args.failures.read_text().splitlines() if args.failures and args.failures.exists() else []
    if not args.passed + args.failed:
        args.failed, names = 1, ["nothing ran"]
    rows[args.part] = args.passed, args.failed, args.seconds, ran_on, datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"), provenance.processor()
    failures[args.part] = list(dict.fromkeys(name.strip() for name in names if name.strip()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--passed", type=int, default=0)
    parser.add_argument("--failed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=0)
    parser.add_argument("--failures", type=Path, help="names, one a line")
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "reports" / "all.md")
    parser.add_argument("--begin", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    rows, failures = read(args.report)
    if args.check:
        bad = [f"{p}: not run" for p in PARTS if p not in rows]
        bad += [f"{p}: {row[1]} failed" for p, row in rows.items() if row[1]]
        bad += [f"{p}: of commit {row[3]}" for p, row in rows.items() if row[3] != commit()]
        print("\n".join(bad) or "every part is of this commit, and none failed")
        return 1 if bad else 0
    if not args.part:
        parser.error("which part?")
    if args.begin:
        rows[args.part], failures[args.part] = (0, 1, 0, commit(), "not yet", provenance.processor()), [NOT_ENDED]
    else:
        ran_on = commit()
        if failures.get(args.part) == [NOT_ENDED] and rows[args.part][3] != ran_on:  # changed while it ran
            ran_on = f"{rows[args.part][3]}..{ran_on}"
        finish(args, rows, failures, ran_on)
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text(text_of(rows, failures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
