"""Values of a thread or of a context, which a program reads: another thread's call has its own. They were taken for what never changes."""
import contextvars
import threading

import pytest
import torch
import vitrify
from torch import nn

LOCAL, CONTEXT = threading.local(), contextvars.ContextVar("CONTEXT", default=1.0)


class Own(threading.local):
    scale = 3.0


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.own = Own()

    def forward(self, x):
        return x * self.own.scale, x * 1


def of_globals(x):
    return x * LOCAL.scale, x * CONTEXT.get()


def test_each_thread_has_its_own():
    module = Module()

    def calls(f, local):
        found = []
        for scale in (2.0, 5.0):
            local.scale, token = scale, CONTEXT.set(scale + 1)
            found.append([t.item() for t in f(torch.ones(1))])
            CONTEXT.reset(token)

        def run():
            local.scale = 9.0
            found.append([t.item() for t in f(torch.ones(1))])
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return found
    for f, local in ((of_globals, LOCAL), (module, module.own)):
        assert calls(vitrify.compile(f), local) == calls(f, local)


@pytest.mark.eager("it writes Python state")
def test_programs_that_write_theirs():
    LOCAL.count = 0

    def f(x):
        LOCAL.count += 1
        CONTEXT.set(CONTEXT.get() + 1)
        return x * LOCAL.count, x * CONTEXT.get()

    def run():
        compiled = vitrify.compile(f)
        return [[t.item() for t in compiled(torch.ones(1))] for _ in range(3)]
    assert contextvars.copy_context().run(run) == [[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]] and LOCAL.count == 3


def test_what_is_set_and_put_back(delta):
    def f(x):
        token = CONTEXT.set(5.0)
        y = x * CONTEXT.get()
        CONTEXT.reset(token)
        return y + CONTEXT.get()
    compiled = vitrify.compile(f)
    assert [compiled(torch.ones(1)).item() for _ in range(3)] == [6.0, 6.0, 6.0]
    token = CONTEXT.set(2.0)
    assert compiled(torch.ones(1)).item() == 7
    CONTEXT.reset(token)
    assert delta.eager_calls == 0


class Unread(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept_apart = Own()

    def forward(self, x):
        return x * 2 + 1


def test_what_is_not_read_costs_nothing(delta):
    compiled = vitrify.compile(Unread())
    assert compiled(torch.ones(1)).item() == compiled(torch.ones(1)).item() == 3
    assert delta.eager_calls == 0
