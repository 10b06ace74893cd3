"""How long compiles take for their size. Records: (name, values of the graphs compiled, seconds), as Recorder makes them; a program that takes far longer than others of its size is an outlier.

compile_times.py FILE...    files of records, JSON: prints size classes, medians and outliers; exit status 1 if there are any
"""
import gc
import json
import statistics
import sys
import time
from pathlib import Path

FACTOR = 20    # times the median of its class
MIN_CLASS = 8  # programs; a smaller class is judged by the one below, and may take longer as its programs are larger
NOISE = 0.25   # seconds: a compile that others' work delays by less is none


class Recorder:
    """What was compiled between entering and leaving: `values` (the results of all nodes of the graphs), `work` (units of about a microsecond, counted where
    it is done, whatever the machine) and `seconds` (sources, capture, passes, schedule, code), of the clock or, where the machine was busy with other work
    and that is less, of the processor."""

    def __enter__(self):
        import vitrify
        self._metrics = vitrify.metrics
        self._start, self._cpu = self._now(), time.process_time()
        return self

    def _now(self):
        m = self._metrics()
        return m["counters"]["values_compiled"], m["counters"]["compile_work"], sum(m["compile_us"].values())

    def __exit__(self, *_):
        self.values, self.work, us = (b - a for a, b in zip(self._start, self._now()))
        self.seconds = min(us / 1e6, time.process_time() - self._cpu)

    def __repr__(self):
        return f"{self.values} values in {self.work} units and {self.seconds:.3f} s"


def leave_out_what_is_there():
    """In a process that only measures: the collector, which may come in the middle of a compile, would walk all of torch's objects for 0.25 s."""
    gc.collect()
    gc.freeze()


def size_class(values):
    """1, 2-3, 4-7, 8-15, ..."""
    return max(values, 1).bit_length() - 1


def classes(records):
    """{class: [(name, values, seconds)]}; programs whose plans were all known compiled nothing and are left out."""
    by = {}
    for name, values, seconds in records:
        if values > 0:
            by.setdefault(size_class(values), []).append((name, values, seconds))
    return dict(sorted(by.items()))


def medians(records):
    found, last, of = {}, None, 0
    for k, members in classes(records).items():
        if len(members) >= MIN_CLASS or last is None:
            last, of = statistics.median(s for _, _, s in members), k
        found[k] = last * 2 ** (k - of)
    return found


def outliers(records, factor=FACTOR):
    """[(name, values, seconds, median of its class)], the worst first."""
    records = list(records)
    middle = medians(records)
    far = [(name, values, s, middle[k]) for k, members in classes(records).items() for name, values, s in members if s > factor * middle[k] and s > NOISE]
    return sorted(far, key=lambda r: -r[2] / r[3])


def table(records):
    records = list(records)
    middle = medians(records)
    lines = ["| values | programs | median | slowest |", "|---|--:|--:|--:|"]
    for k, members in classes(records).items():
        lines.append(f"| {1 << k}-{(2 << k) - 1} | {len(members)} | {middle[k] * 1e3:.1f} ms | {max(s for _, _, s in members) * 1e3:.1f} ms |")
    return "\n".join(lines)


def main(files):
    records = [tuple(r) for f in files for r in json.loads(Path(f).read_text())]
    far = outliers(records)
    print(table(records))
    for name, values, s, median in far:
        print(f"{name}: {values} values, {s:.2f} s, {s / median:.0f} times the median of its size")
    return 1 if far else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
