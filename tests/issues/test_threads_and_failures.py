"""Threads in one compiled function, some of whose calls fail, are compiled anew or are forgotten: nobody's plan goes away under it."""
import sys
import threading
import warnings
from pathlib import Path

import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from test_threads import in_threads  # noqa: E402

N = 16


def work(x):
    for _ in range(6):
        x = (x @ x.t() / x.shape[0] + x).tanh()[:, : x.shape[1]]
    return x  # of about 1


def by_content(x, i):
    """A plan for what `i` says: calls for which it says something else are refused while they run."""
    y = work(x)
    return y * 2 if i.sum() > 0 else y * 3


def by_index(x, i):
    return work(x)[i.long()] + 1


def content(k, n):
    return torch.tensor([1 if (k + n) % 3 else -5])


def index(k, n):
    return torch.tensor([999 if (k + n) % 3 == 0 else 1])


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("program, argument", [(by_content, content), (by_index, index)], ids=["content", "index"])
def test_a_failure_beside_calls(program, argument, grad):
    x = torch.linspace(-1, 1, 96 * 96).reshape(96, 96).requires_grad_(grad)
    known = {}
    for k in range(3):
        i = argument(k, 0)
        try:
            known[i.item()] = program(x, i).detach()
        except IndexError as e:
            known[i.item()] = str(e).partition("\n")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            compiled = vitrify.compile(program)
            compiled(x, argument(1, 0))

            def body(k):
                with torch.set_grad_enabled(grad):
                    for n in range(6):
                        i = argument(k, n)
                        try:
                            ours = compiled(x, i).detach()
                        except IndexError as e:
                            assert str(e).partition("\n")[0] == known[i.item()]
                            continue
                        torch.testing.assert_close(ours, known[i.item()])
            in_threads(N, body)
    assert vitrify.counters["kernels_launched"] > 0


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_reset_and_other_sizes_beside_calls(grad):
    compiled, done = vitrify.compile(work), threading.Event()
    inputs = [torch.linspace(-1, 1, n * n).reshape(n, n).requires_grad_(grad) for n in (64, 80, 96)]
    known = [work(x).detach() for x in inputs]
    gradients = [torch.autograd.grad(work(x).square().sum(), x)[0] for x in inputs] if grad else []
    launched = []

    def resets():
        while not done.is_set():
            launched.append(vitrify.counters["kernels_launched"])
            vitrify.reset()
            done.wait(0.02)
    thread = threading.Thread(target=resets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        thread.start()
        try:
            def body(k):
                with torch.set_grad_enabled(grad):
                    for n in range(8):
                        at = (k + n) % 3
                        y = compiled(inputs[at])
                        torch.testing.assert_close(y.detach(), known[at])
                        if grad:
                            torch.testing.assert_close(torch.autograd.grad(y.square().sum(), inputs[at])[0], gradients[at])
            in_threads(N, body)
        finally:
            done.set()
            thread.join()
    assert max(launched) > 0 or vitrify.counters["kernels_launched"] > 0


@pytest.mark.parametrize("what", ["call", "second order"])
def test_draws_of_another_thread_come_once(what):
    """A capture takes its own draws back: not those that another thread has made between them."""
    expects.compiled("which way each call runs follows from when the other thread draws")
    seen, stop, switch = [], threading.Event(), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def other():
        while not stop.is_set():
            seen.append(torch.rand((), dtype=torch.float64).item())
    thread = threading.Thread(target=other)
    thread.start()
    try:
        for i in range(4):
            x = torch.ones(8, 8, requires_grad=True)
            y = vitrify.compile(lambda x, k=i: F.dropout(F.dropout((x @ x).sin() + k, 0.5), 0.5))(x).sum()
            if what == "call":
                y.backward()
            else:
                torch.autograd.grad(y, x, create_graph=True)[0].square().sum().backward()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(switch)
    assert len(seen) == len(set(seen)) > 100
