"""One program is made, run and judged, in a process of its own kind: a crash or a hang is a failure of that program, and the others go on."""
from __future__ import annotations

import concurrent.futures
import faulthandler
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path

ATTEMPTS = 8
LIFE = 500  # programs of one process
ALONE = 4  # times that a program is run alone in whose eager run the process ended


def programs(task, tell=lambda at: None):
    """The attempts of a task whose first call runs; if there is none, the first attempt. tell(number): eager makes or runs that one."""
    import oracle
    import program
    first, any_runs = None, False
    last = task.get("alone", ATTEMPTS - 1)
    for attempt in [task["attempt"]] if "attempt" in task else range(last + 1):
        tell(attempt)
        p = program.Program(task["seed"], task["length"], task["training"], attempt, task.get("theme"))
        if p.settle(oracle.errors_of):
            any_runs = True
            yield p.without(set(task["dropped"]), set(task["dropped_calls"])) if "dropped" in task else p
        else:
            first = first or p
    if not any_runs:
        yield first


def one(task, tell=lambda at: None) -> dict:
    """Of the first attempt that is eager's bit for bit, or of which eager's results mean something; `aside`: why those before it are no result. `tell` is told
    what comes next."""
    start, aside = time.time(), []
    try:
        for p in programs(task, tell):
            tell(facts(p, task) | {"program": p.describe()})
            result, sure = judged(p, task, tell)
            if sure:
                break
            aside.append(result.get("reason") or result["message"])
    except Exception:
        result = {"seed": task["seed"], "kind": "failed", "message": "the test itself: " + traceback.format_exc(limit=-4), "program": ""}
    return result | {"aside": aside, "seconds": round(time.time() - start, 2)}


def judged(p, task, tell=lambda at: None):
    """The result, and whether it is one: not where it is about numbers, of which the program's meaning was looked for and there is none."""
    import compile_times
    import oracle
    import vitrify
    from compare import Mismatch
    result, reference, sure = facts(p, task), oracle.Reference(p, tell), True
    if "alone" in task:  # up to the attempt that eager's run ended the process in
        reference.meaningless()
        return result | {"kind": "failed", "message": "eager's own run ended the process, and does not where nothing compiled ran before", "program": p.describe()}, False
    if task.get("describe"):
        result["program"] = p.describe()
    vitrify.reset()
    with compile_times.Recorder() as record:
        try:
            result |= oracle.check(p, reference)
            sure = result["kind"] != "inconclusive"
        except Mismatch as wrong:
            result |= {"kind": "failed", "message": str(wrong), "program": p.describe()}
            sure = "attempt" in task or not isinstance(wrong, oracle.OfValues) or not reference.meaningless()
        except Exception:
            result |= {"kind": "failed", "message": "the test itself: " + traceback.format_exc(limit=-6), "program": p.describe()}
    vitrify.reset()
    return result | {"compiled_values": record.values, "compile_s": round(record.seconds, 4)}, sure


def serve(do=one):
    """Tasks from standard input, results to standard output, a line each."""
    faulthandler.enable()
    import compile_times
    import torch
    import vitrify
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    vitrify.compile(lambda x: torch.relu(x) + 1)(torch.ones(3))  # opens what the first compile opens
    compile_times.leave_out_what_is_there()
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print
    print("ready", file=results, flush=True)
    for line in sys.stdin:
        print(json.dumps(do(json.loads(line), lambda at: print(json.dumps({"at": at}), file=results, flush=True))), file=results, flush=True)


def threads_of(pid):
    """Each thread's state (R: it computes, S: it waits), where in the kernel it waits, and the seconds that it has computed: a lock that nobody gives back looks otherwise than a long loop."""
    said, second = [], os.sysconf("SC_CLK_TCK")
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        try:
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            said.append(f"{fields[0]} {(task / 'wchan').read_text()} {(int(fields[11]) + int(fields[12])) / second:.0f} s")
        except OSError:
            pass
    return f"{len(said)} threads: {'; '.join(said)}"


class Process:
    """A worker that is started again when it ended, hung or has done enough."""

    def __init__(self, limit, script=Path(__file__).with_name("run.py")):
        self.limit, self.script, self.process, self.done = limit, script, None, 0

    def start(self):
        self.errors = tempfile.TemporaryFile("w+")
        env = os.environ | {"OMP_WAIT_POLICY": "passive"}
        self.process = subprocess.Popen([sys.executable, str(self.script), "--worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, env=env)
        self.lines, self.done = queue.Queue(), 0
        threading.Thread(target=self.listen, args=(self.process, self.lines), daemon=True).start()
        if self.read(300) != "ready":
            raise RuntimeError(f"a worker does not start: {self.tail()}")

    @staticmethod
    def listen(process, lines):
        for line in process.stdout:
            lines.put(line.strip())
        lines.put(None)

    def read(self, seconds):
        try:
            return self.lines.get(timeout=seconds)
        except queue.Empty:
            return ""

    def tail(self):
        self.errors.seek(0)
        return self.errors.read()[-1500:]

    def do(self, task) -> dict:
        if self.process is None or self.done >= LIFE:
            self.close()
            self.start()
        self.done += 1
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        end, eager, reached = time.time() + self.limit, False, 0
        at = {"seed": task["seed"], "program": f"seed {task['seed']}, which was not made"}
        while line := self.read(max(0.0, end - time.time())):
            answer = json.loads(line)
            if "at" not in answer:
                return answer
            eager = not isinstance(answer["at"], dict)
            reached = answer["at"] if isinstance(answer["at"], int) else reached
            at = at if eager else answer["at"] or at
        hung = line == ""
        threads = ""
        if hung:
            threads = threads_of(self.process.pid)
            self.process.send_signal(signal.SIGABRT)  # prints where it is
        code = self.process.wait()
        what = f"no end within {self.limit:.0f} s, {threads}" if hung else f"the process ended with {code}"
        told = self.tail()
        self.process = None
        if eager and not hung and "theme" in at and "alone" not in task:  # what compiled code did before may be why, or eager ends now and then
            for _ in range(ALONE):
                result = self.do(task | {"alone": reached})
                if result["kind"] == "left":
                    break
            return result
        if eager and not hung:
            return {**at, "kind": "left", "reason": f"eager itself: {what}", "compiled_values": 0, "compile_s": 0.0}
        return {**at, "kind": "failed", "message": f"{what}: {told}"}

    def close(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process = None


def each(tasks, jobs, make, told):
    """The results of tasks in order of seeds, by `jobs` processes that make() starts. told(process, task, result) is called of one result at a time."""
    tasks, results, lock = iter(tasks), [], threading.Lock()

    def work():
        process = make()
        while True:
            with lock:
                task = next(tasks, None)
            if task is None:
                process.close()
                return
            result = process.do(task)
            with lock:
                results.append(result)
                told(process, task, result)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(work) for _ in range(jobs)]:
            done.result()
    return sorted(results, key=lambda r: r["seed"])


def facts(p, task):
    return {"seed": task["seed"], "theme": p.theme, "attempt": p.attempt, "length": task["length"], "lines": len(p.body.lines) + len(p.body.results), "calls": len(p.calls)}
