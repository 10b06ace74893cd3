"""In-place ops whose functional form gives real numbers of complex ones: eager refuses them, and they were computed."""
import pytest
import torch
import vitrify
from beside import same_outcome
from expects import no_kernels

OPS = {"abs_": lambda x: x.abs_(), "absolute_": lambda x: x.absolute_(), "foreach": lambda x: torch._foreach_abs_([x]), "of a part": lambda x: x[1:].abs_()}


@pytest.mark.parametrize("name", OPS)
def test_eager_refuses_them(name):
    no_kernels("eager raises")

    def run(f):
        x = torch.full((3,), 1 + 2j)
        with pytest.raises(RuntimeError, match="In-place abs is not supported for complex tensors"):
            f(x)
        return x, x._version
    assert str(run(vitrify.compile(OPS[name]))) == str(run(OPS[name]))


@pytest.mark.compiled("ATen computes complex numbers")
def test_numbers_that_are_stored_as_complex_ones():
    def run(f):
        x = torch.tensor([0j, 1j, 2 + 0j])
        return f(x), x
    same_outcome(lambda f: run(f), lambda x: x.logical_not_().add_(1))
