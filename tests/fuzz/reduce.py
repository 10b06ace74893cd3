"""A failing program without the calls, lines and results that it fails without."""
from __future__ import annotations

import re


def same_kind(message):
    """What a failure says without its numbers and places."""
    return re.sub(r"call \d+|out[^:]*|in\[\d+\]|[-\d.e+]+|\(.*?\)", "", message)[:40]


def shortest(process, task, result):
    if "attempt" not in result:
        return result
    task = task | {"attempt": result["attempt"], "dropped": [], "dropped_calls": []}
    best = result
    for key, count in (("dropped_calls", result["calls"]), ("dropped", result["lines"]), ("dropped", result["lines"]), ("dropped_calls", result["calls"])):
        for i in reversed(range(count)):
            if i in task[key]:
                continue
            shorter = task | {key: [*task[key], i]}
            now = process.do(shorter)
            if now["kind"] == "failed" and same_kind(now["message"]) == same_kind(result["message"]):
                task, best = shorter, now
    return best
