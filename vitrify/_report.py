"""What happened: counters, compile times, the option table."""
import csv
import json
from collections.abc import Mapping

from . import _C


class _Counters(Mapping):
    """Read-only and live: counters["kernels_built"]."""

    def __getitem__(self, name):
        return _C.counters()[name]

    def __iter__(self):
        return iter(_C.counters())

    def __len__(self):
        return len(_C.counters())

    def __repr__(self):
        return f"counters({_C.counters()})"


counters = _Counters()


class Metrics(dict):
    """Rows of (name, value), by group."""

    def rows(self):
        return [(f"{group}.{name}", value) for group, values in self.items() for name, value in values.items()]

    def csv(self, path):
        with open(path, "w", newline="") as f:
            csv.writer(f).writerows([("name", "value"), *self.rows()])

    def json(self, path):
        with open(path, "w") as f:
            json.dump(self, f, indent=2)

    def __repr__(self):
        return "\n".join(f"{name:40} {value}" for name, value in self.rows())


def metrics():
    """Compile time by stage in microseconds, and the counters."""
    return Metrics(compile_us=_C.stage_times(), counters=_C.counters())


class OptionTable(list):
    def __repr__(self):
        rows = [("option", "type", "default", "cache key", "meaning"), *((n, t, d, "yes" if k else "no", h) for n, t, d, k, h in self)]
        widths = [max(len(str(r[i])) for r in rows) for i in range(4)]
        return "\n".join("  ".join([*(str(r[i]).ljust(widths[i]) for i in range(4)), r[4]]) for r in rows)


def options():
    """Every option: name, type, default, whether it enters the cache key, meaning."""
    return OptionTable(_C.option_table())
