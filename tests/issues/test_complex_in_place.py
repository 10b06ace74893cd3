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


FILLS = {"fill_": lambda z: z.fill_(2j), "zero_": lambda z: z.zero_(), "a part": lambda z: z[:, 1:3].fill_(3), "turned": lambda z: z.t().zero_()}


@pytest.mark.compiled("ATen computes complex numbers")
@pytest.mark.parametrize("name", FILLS)
def test_fills_of_memory_with_gaps(name):
    """What fills them gives dense memory: every call was found to be another than recorded, and eager served it."""
    def program(z):
        FILLS[name](z)
        return z + 1
    compiled = vitrify.compile(program, fullgraph=True)

    def run(f, lie):
        memory = torch.arange(48).to(torch.complex64).view(6, 8)
        z = lie(memory)
        with torch.no_grad():
            out = f(z)
        return out, out.stride(), memory, memory._version
    for lie in (lambda m: m[1:4, 1:6], lambda m: m[1:4, 1:6], lambda m: m[::2, ::2].t()):
        eager, ours = run(program, lie), run(compiled, lie)
        assert torch.equal(ours[0], eager[0]) and torch.equal(ours[2], eager[2]) and ours[1] == eager[1] and ours[3] == eager[3]
    assert vitrify.counters["eager_calls"] == 0
