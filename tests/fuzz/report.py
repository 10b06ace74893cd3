"""The verdict of a run: counts, bounds, what took long; written by the script that ran it."""
from __future__ import annotations

import collections
import re
import time

import compile_times
import provenance

INCONCLUSIVE, NOT_COMPILED, LEFT = 0.01, 0.02, 0.03
ASIDE = 0.05  # of the programs that ran: others ran in their place, since a leaf of eager's means nothing
NATIVE = 0.6  # at least: programs that raise, or only call libraries, say little
KINDS = {"ok": "as eager, with native kernels", "library": "as eager, nothing but views and library calls", "raises": "raise as eager does in every call",
         "inconclusive": "inconclusive", "left": "left to eager on purpose", "eager": "not compiled", "failed": "failed"}


def about(reason):
    """A reason without names, numbers and places."""
    return re.sub(r" \((<fuzz|/).*", "", re.sub(r"vitrify: \S+ runs eagerly: ", "", reason)).partition("\n")[0]


def name_of(result):
    return f"seed {result['seed']}"


def compiles(results):
    """As compile_times takes them."""
    return [(name_of(r), r["compiled_values"], r["compile_s"]) for r in results if "compile_s" in r]


class Verdict:
    def __init__(self, args, results, seconds):
        self.args, self.results, self.seconds = args, results, seconds
        self.counts = collections.Counter(r["kind"] for r in results)
        self.compiles = compiles(results)
        self.slow = compile_times.outliers(self.compiles)
        self.aside = sum(len(r.get("aside", ())) for r in results)
        n = max(1, len(results))
        # of a handful nothing can be said in percent
        self.why = [why for bad, why in ((self.counts["failed"], "programs failed"), (self.counts["inconclusive"] > max(1, INCONCLUSIVE * n), f"more than {INCONCLUSIVE:.0%} inconclusive"),
                                         (self.counts["eager"] > max(1, NOT_COMPILED * n), f"more than {NOT_COMPILED:.0%} not compiled"), (self.counts["left"] > max(1, LEFT * n), f"more than {LEFT:.0%} left to eager"), (len(results) >= 100 and self.counts["ok"] < NATIVE * len(results), f"less than {NATIVE:.0%} with native kernels"), (self.aside > max(1, ASIDE * (n + self.aside)), f"more than {ASIDE:.0%} set aside"), (len(results) < self.args.n, "not all programs ran"), (self.slow, f"compiles took over {compile_times.FACTOR} times their size class's median")) if bad]
        self.passed = not self.why

    def line(self):
        counts = ", ".join(f"{self.counts[k]} {what}" for k, what in KINDS.items())
        return f"{len(self.results)} programs from seed {self.args.seed}: {counts}; {len(self.slow)} compiled slowly, {self.aside} set aside ({self.seconds:.0f} s): {'passed' if self.passed else 'FAILED: ' + '; '.join(self.why)}"

    def text(self):
        import torch
        rows = [("commit", provenance.commit_of(self.args)), ("torch", torch.__version__), ("processor", provenance.processor()), ("date", time.strftime("%Y-%m-%d", time.gmtime())),
                ("seeds", f"{self.args.seed} to {self.args.seed + self.args.n - 1}, up to {self.args.length} lines"), ("time", f"{self.seconds:.0f} s, {self.args.jobs} processes")]
        n = max(1, len(self.results))
        parts = [f"# Random {'training' if self.args.training else 'inference'} programs, compiled beside eager", "Written by `./x fuzz --report`.", table(("", ""), rows),
                 f"**{'Passed' if self.passed else 'Failed: ' + '; '.join(self.why)}.**", table(("outcome", "programs", "share"), [(what, self.counts[k], f"{self.counts[k] / n:.2%}") for k, what in KINDS.items()])]
        parts.append(f"{self.aside} more programs were set aside ({self.aside / (n + self.aside):.2%} of all that ran): numbers of theirs differ from eager's where a rounding changes what eager gives, "
                     "and another program of the same seed is counted in their place; what differed is listed below. What is no number (errors, shapes, strides, aliasing, versions, random state) is judged of these too.")
        themes = collections.defaultdict(collections.Counter)
        for r in self.results:
            themes[r.get("theme", "?")][r["kind"]] += 1
        parts.append(table(("made mostly of", *KINDS), [(theme, *(themes[theme][k] for k in KINDS)) for theme in sorted(themes)]))
        parts.append("Compile time of a program's graphs together, by their nodes:\n\n" + compile_times.table(self.compiles))
        listed = [(title, [(r[key], r["seed"]) for r in self.results if r["kind"] == kind])
                  for title, kind, key in (("Not compiled", "eager", "reason"), ("Left to eager on purpose", "left", "reason"), ("Inconclusive", "inconclusive", "reason"), ("Failed", "failed", "message"))]
        for title, all_of in [*listed, ("Set aside", [(re.sub(r"\d[\d.e+-]*", "n", why), r["seed"]) for r in self.results for why in r.get("aside", ())])]:
            found = collections.defaultdict(list)
            for why, seed in all_of:
                found[about(why)[:160]].append(seed)
            if found:
                parts.append(f"## {title}\n\n" + table(("why", "seeds"), [(why.replace("|", "/"), ", ".join(map(str, seeds[:12])) + (f" and {len(seeds) - 12} more" if len(seeds) > 12 else ""))
                                                                        for why, seeds in sorted(found.items(), key=lambda item: -len(item[1]))[:40]]))
        if self.slow:
            parts.append("## Slow to compile\n\n" + table(("program", "nodes", "seconds", "median"), [(name, nodes, f"{s:.2f}", f"{m:.3f}") for name, nodes, s, m in self.slow]))
        return "\n\n".join(parts) + "\n"


def table(head, rows):
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows))
