"""Derivatives of eigen- and singular vectors read a value to raise where a loss is ill-defined: the whole program ran eagerly. What is checked is part of the backward."""
import pytest
import torch
import vitrify

PROGRAMS = {
    "eig": lambda x: torch.linalg.eig(x)[1].abs().square().sin().sum(),
    "eigenvalues and vectors": lambda x: torch.linalg.eig(x)[0].abs().sum() + torch.linalg.eig(x)[1].abs().square().sin().sum(),
    "eigvals": lambda x: torch.linalg.eigvals(x).abs().sum(),
    "eigh": lambda x: torch.linalg.eigh(x @ x.mH)[1].abs().square().sin().sum(),
    "svd": lambda x: torch.linalg.svd(x)[0].abs().square().sin().sum(),
    "of a phase, eig": lambda x: torch.linalg.eig(x)[1].real.sum(),
    "of a phase, eigh": lambda x: torch.linalg.eigh(x @ x.mH)[1].real.sum(),
    "of a phase, svd": lambda x: torch.linalg.svd(x)[0].real.sum(),
}


def outcome(f, x, order):
    grads = [f(x.requires_grad_())]
    try:
        for k in range(order):
            grads.append(torch.autograd.grad(grads[-1].abs().square().sum(), x, create_graph=k + 1 < order)[0])
        return [g.detach() for g in grads]
    except RuntimeError as e:
        return str(e)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("shape", [(3, 3), (2, 4, 4)], ids=["one", "batch"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call(name, dtype, shape, order):
    compiled = vitrify.compile(PROGRAMS[name], fullgraph=True)
    for seed in range(2):
        x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        ours, eager = outcome(compiled, x, order), outcome(PROGRAMS[name], x, order)
        assert isinstance(eager, str) == (name == "of a phase, eig" or "phase" in name and dtype.is_complex)
        if isinstance(eager, str):
            assert ours == eager
        else:
            torch.testing.assert_close(ours, eager)


def test_some_calls_raise():
    """What is checked is of each call's own values."""
    def fn(x, w):
        return (torch.linalg.eig(x)[1].real * w).sum()
    compiled, said = vitrify.compile(fn, fullgraph=True), []
    for f in (compiled, fn):
        for w in (1.0, 0.0, 1.0, 1e-4):
            x = torch.randn(3, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)).requires_grad_()
            try:
                said.append(torch.autograd.grad(f(x, torch.tensor(w)), x)[0].abs().sum().item())
            except RuntimeError as e:
                said.append(str(e))
    assert [isinstance(s, str) for s in said] == [True, False, True, False] * 2
    assert said[:4] == pytest.approx(said[4:]) if not isinstance(said[0], str) else said[0] == said[4] and said[1] == pytest.approx(said[5])
