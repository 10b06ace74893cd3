"""Methods of arguments that are taken apart (dataclasses, named tuples, enums): what they read was taken to stay."""
import dataclasses
import enum
import typing

import pytest
import torch

import vitrify

STATE = {"scale": 2.0, "calls": 0}


@dataclasses.dataclass
class Batch:
    x: torch.Tensor

    def scaled(self):
        return self.x * STATE["scale"]


class Pair(typing.NamedTuple):
    x: torch.Tensor
    y: float

    def scaled(self):
        return self.x * STATE["scale"] * self.y


class Kind(enum.Enum):
    ONE = 1

    def scaled(self):
        return torch.ones(2) * STATE["scale"]


ARGUMENTS = {"dataclass": lambda: Batch(torch.ones(2)), "named tuple": lambda: Pair(torch.ones(2), 3.0), "enum": lambda: Kind.ONE}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_they_read_is_seen(name, monkeypatch):
    monkeypatch.setitem(STATE, "scale", 2.0)
    f, o = lambda o, x: o.scaled() + x, ARGUMENTS[name]()
    compiled, x = vitrify.compile(f), torch.ones(2)
    for scale in (2.0, 2.0, 5.0, 7.0):
        STATE["scale"] = scale
        torch.testing.assert_close(compiled(o, x), f(o, x))
    monkeypatch.setattr(type(o), "scaled", lambda self: x * 100)
    torch.testing.assert_close(compiled(o, x), f(o, x))
