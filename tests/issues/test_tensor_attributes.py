"""Attributes that users write to tensor objects, and programs read: of parameters, buffers, globals and arguments."""
import pytest
import torch
import vitrify
from expects import eager
from torch import nn


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(3.0))
        self.register_buffer("b", torch.ones(3))
        self.w.scale, self.b.scale = 3, 2

    def forward(self, x):
        return x * self.w.scale + self.b.scale * self.w + self.w * getattr(self.w, "more", 1)


GLOBAL = torch.arange(3.0)
READS = {
    "attribute": lambda x: x.sin() * GLOBAL.scale, "getattr": lambda x: x.sin() * getattr(GLOBAL, "more", 2), "hasattr": lambda x: x.sin() * (2 if hasattr(GLOBAL, "more") else 3),
    "vars": lambda x: x.sin() * len(vars(GLOBAL)), "dict": lambda x: x.sin() * GLOBAL.__dict__.get("more", 5), "what one holds": lambda x: x.sin() * GLOBAL.holds.scale,
    "a tensor that one holds": lambda x: x.sin() * GLOBAL.holds,
}


@pytest.fixture
def fresh():
    GLOBAL.scale, GLOBAL.holds = 3, torch.arange(3.0)
    GLOBAL.holds.scale = 4
    yield
    vars(GLOBAL).clear()


WRITES = {
    "another value": lambda: setattr(GLOBAL, "scale", 7), "a new one": lambda: setattr(GLOBAL, "more", 9), "one less": lambda: delattr(GLOBAL, "more"),
    "in what one holds": lambda: setattr(GLOBAL.holds, "scale", 8), "another tensor": lambda: setattr(GLOBAL, "holds", GLOBAL.holds.clone() + 1),
    "in its memory": lambda: GLOBAL.holds.add_(1),
}


@pytest.mark.parametrize("name", READS)
def test_of_a_global(fresh, name):
    f = READS[name]
    compiled, x = vitrify.compile(f), torch.linspace(0, 1, 3)
    torch.testing.assert_close(compiled(x), f(x))
    for write in WRITES.values():
        write()
        if not hasattr(GLOBAL.holds, "scale"):
            GLOBAL.holds.scale = 6
        for _ in range(2):
            torch.testing.assert_close(compiled(x), f(x))


def test_of_parameters_and_buffers():
    m = Scaled()
    compiled, x = vitrify.compile(m), torch.ones(3)
    for write in (lambda: None, lambda: setattr(m.w, "scale", 4), lambda: setattr(m.b, "scale", 5), lambda: setattr(m.w, "more", 6), lambda: delattr(m.w, "more")):
        write()
        torch.testing.assert_close(compiled(x), m(x))


def test_one_that_no_program_reads_costs_no_plan():
    m = nn.Linear(3, 3)
    compiled, x = vitrify.compile(m), torch.ones(2, 3)
    compiled(x)
    before = vitrify.counters["captures"]
    for n in range(4):
        m.weight.seen_by_somebody = n
        torch.testing.assert_close(compiled(x), m(x))
    assert vitrify.counters["captures"] == before


ARGUMENTS = {"attribute": lambda x: x.sin() * x.scale, "getattr": lambda x: x.sin() * getattr(x, "scale", 2), "hasattr": lambda x: x.sin() * (2 if hasattr(x, "scale") else 3),
             "vars": lambda x: x.sin() * len(vars(x))}


@pytest.mark.parametrize("marked", [False, True], ids=["plain", "marked"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_of_an_argument(name, marked):
    f = ARGUMENTS[name]
    compiled = vitrify.compile(f)
    eager("argument 0 has the attribute scale, which the program may read")
    for scale in (None, 3, 4, None, 5):
        x = torch.linspace(0, 1, 3)
        if marked and name != "vars":
            vitrify.mark_dynamic(x, 0)
        if scale:
            x.scale = scale
        try:
            known = f(x)
        except AttributeError as e:
            with pytest.raises(AttributeError, match=str(e)):
                compiled(x)
            continue
        torch.testing.assert_close(compiled(x), known)


def test_of_an_argument_that_no_program_reads():
    compiled = vitrify.compile(lambda x: x.sin())
    for n in range(4):
        x = torch.linspace(0, 1, 3)
        x.seen_by_somebody = n
        torch.testing.assert_close(compiled(x), x.sin())
    assert vitrify.counters["captures"] == 1
