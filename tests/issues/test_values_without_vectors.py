"""Eigenvalues and singular values alone come from routines that make no vectors: their last bits, and what they refuse, are eager's. A capture asked for the vectors as well."""
import expects
import pytest
import torch
import vitrify

PROGRAMS = {"eigvalsh": torch.linalg.eigvalsh, "upper": lambda x: torch.linalg.eigvalsh(x, UPLO="U"), "svdvals": torch.linalg.svdvals, "cond": torch.linalg.cond, "nuclear": lambda x: torch.linalg.matrix_norm(x, "nuc"), "two": lambda x: torch.linalg.matrix_norm(x, 2),
            "norm": lambda x: torch.linalg.norm(x, -2), "named": lambda x: torch.norm(x, "nuc"), "between": lambda x: torch.linalg.eigvalsh(x * 2) + 1}


def numbers(text):
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    x = x + x.t()
    if text == "nan":
        x[1, 1] = torch.nan
    return [x.expand(2, 4, 4) if text == "batch" else x]


@pytest.mark.compiled("ATen computes all of some")
@pytest.mark.parametrize("text", ["one", "batch", "nan"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("grad", [False, True])
def test_values(name, text, grad):
    compiled = vitrify.compile(PROGRAMS[name], fullgraph=True)

    def told(run):
        try:
            return run(*numbers(text))
        except RuntimeError as e:
            return str(e)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            ours, eager = told(compiled), told(PROGRAMS[name])
            if isinstance(eager, str):
                expects.no_kernels("the program raises")
            assert torch.equal(ours, eager) if isinstance(eager, torch.Tensor) else ours == eager


@pytest.mark.compiled("ATen computes all of some")
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name):
    def told(run):
        x = numbers("one")[0].double().requires_grad_()
        run(x).sum().backward()
        return x.grad
    torch.testing.assert_close(told(vitrify.compile(PROGRAMS[name])), told(PROGRAMS[name]))
