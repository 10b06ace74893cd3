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


@pytest.mark.eager("which has another value in each thread or context")
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
