"""Libraries of custom ops that are taken back, and ops that are defined again: compiled calls do what eager does then."""
import gc

import pytest
import torch
import vitrify
from expects import eager


def library(factor):
    lib = torch.library.Library("vt_gone", "FRAGMENT")
    lib.define("scale(Tensor x) -> Tensor")
    lib.impl("scale", lambda x: x * factor, "CPU")
    lib.impl("scale", lambda x: torch.empty_like(x), "Meta")
    return lib


def test_a_library_is_taken_back():
    lib, x, y = library(2), torch.ones(3), torch.zeros(3)

    def program(x):
        y.add_(1)
        return torch.ops.vt_gone.scale(x + 1).sin() + 1
    compiled = vitrify.compile(program)
    torch.testing.assert_close(compiled(x), torch.sin(2 * (x + 1)) + 1)
    lib._destroy()
    del lib
    gc.collect()
    eager("is no longer registered, or another op of that name")
    for n in range(3):
        with pytest.raises(AttributeError, match="has no attribute 'scale'"):
            compiled(x)
        assert torch.equal(y, torch.full((3,), n + 2.0))


def test_an_op_is_defined_again():
    def define(factor):
        @torch.library.custom_op("vt_again::scale", mutates_args=())
        def scale(x: torch.Tensor) -> torch.Tensor:
            return x * factor
        scale.register_fake(torch.empty_like)
    define(2)
    program = lambda x: torch.ops.vt_again.scale(x).sin() + 1  # noqa: E731
    compiled, x = vitrify.compile(program), torch.ones(3)
    eager("is no longer registered, or another op of that name", some=True)
    for factor in (2, 5, 7):
        if factor != 2:
            define(factor)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), torch.sin(factor * x) + 1)


def test_another_kernel():
    lib, x = torch.library.Library("vt_other", "DEF"), torch.ones(3)
    lib.define("scale(Tensor x) -> Tensor")
    lib.impl("scale", lambda x: torch.empty_like(x), "Meta")
    compiled = vitrify.compile(lambda x: torch.ops.vt_other.scale(x).sin() + 1)
    for factor in (2, 5):
        kernel = torch.library.Library("vt_other", "IMPL")
        kernel.impl("scale", lambda x: x * factor, "CPU")
        for _ in range(2):
            torch.testing.assert_close(compiled(x), torch.sin(factor * x) + 1)
        kernel._destroy()
