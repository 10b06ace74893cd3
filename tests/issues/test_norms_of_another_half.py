"""A norm does not narrow: of one half type no norm in the other is taken."""
import expects
import pytest
import torch
import vitrify

NORMS = {"vector": torch.linalg.vector_norm, "norm": torch.linalg.norm, "old": lambda x, dtype: torch.norm(x, 2, dtype=dtype)}
HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("of", [*HALVES, torch.float32])
@pytest.mark.parametrize("to", [*HALVES, torch.float32, torch.float64])
def test_dtypes(name, of, to):
    def told(compile):
        f = compile(lambda x: NORMS[name](x + 1, dtype=to))
        try:
            return f(torch.ones(2, 3).to(of))
        except RuntimeError as e:
            return str(e)
    ours, eager = told(vitrify.compile), told(lambda f: f)
    assert type(ours) is type(eager)
    if isinstance(eager, str):
        expects.no_kernels("raises")
        assert ours == eager
    else:
        torch.testing.assert_close(ours, eager)
