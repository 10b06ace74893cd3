"""A call that is run again, eagerly, because a custom op gave something else than it said: the compiled programs that it calls belong to it.

One of them was captured within that run, and took the run's mode with it: no op of the thread could be called any more."""
import pytest
import torch
import vitrify
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

ran = []


@torch.library.custom_op("started_again::rolled", mutates_args=())
def rolled(x: torch.Tensor) -> torch.Tensor:
    ran.append(tuple(x.shape))
    return compiled_roll(x).clone()


@rolled.register_fake
def _(x):
    return torch.empty_like(x)


compiled_roll = vitrify.compile(lambda a: a.roll(3, 0))
INNER = {"view": lambda a: a.t(), "with an op": lambda a: rolled(a.t()) * 2, "sum": lambda a: a.t() + 1, "two": lambda a: rolled(rolled(a.t()).t())}


@pytest.mark.eager("strides [7,1], recorded", some=True)
@pytest.mark.parametrize("warm", [False, True], ids=["first", "compiled before"])
@pytest.mark.parametrize("name", INNER)
def test_nested(name, warm):
    x = torch.arange(49.0).view(7, 7)

    def told(compile):
        inner = compile(INNER[name])
        if warm:
            inner(x)
        f, seen = compile(lambda x: rolled(inner(x)) + 1), []
        for k in range(3):
            ran.clear()
            seen += [f(x + k), list(ran)]
        return seen
    for a, b in zip(told(vitrify.compile), told(lambda f: f)):
        if isinstance(a, list):
            assert a == b
        else:
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
    assert not _get_current_dispatch_mode_stack()
    assert torch.zeros(2).sum().item() == 0
