"""Looks for leaks of Python programs: runs them many times, drops everything and asks the leak checker while the interpreter still lives. What torch and the interpreter lose once does not count: a leak of a program grows with its rounds.

PYTHONMALLOC=malloc LD_PRELOAD="libasan.so (or liblsan.so) libstdc++.so" python tests/leaks.py [PROGRAM...]: exit status 1 and a report if a program leaks, or if a leak made on purpose is not seen; 2 if there is no checker."""
import ctypes
import gc
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import vitrify  # noqa: E402
from torch import nn  # noqa: E402

ROUNDS = 20


def inference():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).eval()
    f = vitrify.compile(net)
    with torch.no_grad():
        for n in (1, 2, 1):
            f(torch.randn(n, 3, 8, 8))
        net[3].weight.mul_(2)  # packed copies are made again
        f(torch.randn(1, 3, 8, 8))


def in_place():
    def step(h, x):
        h.add_(x.sin())
        h[1:].copy_(x[:-1])
        return h * 2, x
    f = vitrify.compile(step)
    f(torch.zeros(4, 5), torch.randn(4, 5))


def training():
    net = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 3))
    f, optimizer = vitrify.compile(net), torch.optim.AdamW(net.parameters(), fused=False)
    for _ in range(2):
        optimizer.zero_grad()
        f(torch.randn(5, 6)).square().mean().backward()
        optimizer.step()
    f(torch.randn(5, 6))  # a forward that is never differentiated


def second_derivatives():
    f = vitrify.compile(lambda x, w: (x @ w).tanh().pow(3).sum())
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    (g,) = torch.autograd.grad(f(x, w), x, create_graph=True)
    g.square().sum().backward()


def written_in_training():
    f = vitrify.compile(lambda h, w: h.add_((h * w).sin()))
    w = torch.randn(4, requires_grad=True)
    f(torch.zeros(4) + w * 0, w)


def errors():
    f = vitrify.compile(lambda x, i: x.sin()[i] + 1)
    try:
        f(torch.ones(3), torch.tensor([7]))
    except IndexError:
        pass
    g = vitrify.compile(lambda x: x.view(7))
    try:
        g(torch.ones(3))
    except RuntimeError:
        pass


def dynamic():
    f = vitrify.compile(lambda x: torch.softmax(x, -1).cumsum(0)[x[:, 0] > 0], dynamic=True)
    for n in (3, 5, 8):
        f(torch.randn(n, 4))


PROGRAMS = (inference, in_place, training, second_derivatives, written_in_training, errors, dynamic)


def leaked(process):
    """(allocations that nothing refers to, the checker's report)."""
    vitrify.reset()
    gc.collect()
    saved = os.dup(2)
    with tempfile.TemporaryFile("w+") as report:
        os.dup2(report.fileno(), 2)
        process.__lsan_do_recoverable_leak_check()
        os.dup2(saved, 2)
        os.close(saved)
        report.seek(0)
        text = report.read()
    found = re.search(r"leaked in (\d+) allocation", text)
    return int(found[1]) if found else 0, text


def main():
    process = ctypes.CDLL(None)
    if not hasattr(process, "__lsan_do_recoverable_leak_check"):
        print("no leak checker is loaded")
        return 2
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    process.malloc.restype = ctypes.c_void_p

    def on_purpose():
        process.malloc(1234)
    wrong = 0
    for program in (*(p for p in PROGRAMS if not sys.argv[1:] or p.__name__ in sys.argv[1:]), on_purpose):
        program()
        program()
        before, _ = leaked(process)  # what torch and the interpreter lose once
        for _ in range(ROUNDS):
            program()
        after, text = leaked(process)
        leaks = after - before >= ROUNDS
        print(f"{program.__name__}: {before} allocations lost, {after} after {ROUNDS} more rounds{': LEAKS' if leaks else ''}", flush=True)
        if leaks != (program is on_purpose):
            wrong = 1
            print(text if leaks else "a leak made on purpose is not seen", flush=True)
    return wrong


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # what the interpreter leaves behind on its way out is not asked for
