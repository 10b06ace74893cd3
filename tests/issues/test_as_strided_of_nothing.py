"""as_strided of a tensor without elements raises where it looks at something: the extent of (0, 8) was taken for 8, so that views of up to 8 elements passed."""
import pytest
import torch
import vitrify

SHAPES = [(0, 8), (8, 0), (1, 0, 8), (0,)]
PROGRAMS = {
    "unused": lambda x, y: (x.as_strided((3,), (2,)), y * 2)[1], "view": lambda x, y: x.as_strided((3,), (2,)) + y, "copy": lambda x, y: torch.as_strided_copy(x, (3,), (2,)) + y,
    "of one": lambda x, y: x.as_strided((1,), (1,)) + y, "computed": lambda x, y: (x + 1).as_strided((1,), (1,)) + y,
}


@pytest.mark.no_kernels("eager raises")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_raises(program, shape):
    compiled = vitrify.compile(PROGRAMS[program])
    for _ in range(2):
        with torch.no_grad(), pytest.raises(RuntimeError, match="out of bounds for storage"):
            compiled(torch.zeros(shape), torch.ones(3))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_of_nothing(shape):
    compiled = vitrify.compile(lambda x, y: (x.as_strided((0, 3), (1, 1)) + 1, y * 2))
    with torch.no_grad():
        nothing, twice = compiled(torch.zeros(shape), torch.ones(3))
    assert nothing.shape == (0, 3) and twice.tolist() == [2.0] * 3
