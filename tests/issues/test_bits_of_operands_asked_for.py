"""Where a kernel is asked on zeros what it gives, those have the conjugate and negative bits of what they stand for: some kernels look at them."""
import pytest
import torch
import vitrify


def conjugates(x):
    y = (x.real * 2).sin()
    try:
        return torch.view_as_real(torch.dot((x[0] * 2).conj(), (x[1] * 2).conj())), y
    except RuntimeError as e:
        assert "unresolved conjugated" in str(e)
        return y


def resolved(x):
    return torch.view_as_real(torch.dot((x[0] * 2).conj(), (x[1] * 2).conj()).resolve_conj())


def triangular(x):
    return torch.linalg.solve_triangular((x * 2).mH, x[:, :2] * 2, upper=False)


def triangular_of_both(x):
    return torch.linalg.solve_triangular((x * 2).mH, (x[:, :2] * 2).conj(), upper=False)


def product(x):
    return (x * 2).mH @ (x + 1).conj(), torch.vdot((x[0] * 2).conj(), x[1] * 3)


@pytest.mark.eager("lays its result out by the conjugate or negative bit", some=True)
@pytest.mark.eager("raises, which the program catches", some=True)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("f", [conjugates, resolved, triangular, triangular_of_both, product])
def test_bits_are_seen(f, dynamic):
    found = []
    for g in (vitrify.compile(f, dynamic=dynamic), f):
        torch.manual_seed(0)
        x = torch.randn(4, 4, dtype=torch.complex128)
        try:
            with torch.no_grad():
                t = g(x)
            found.append([(u.resolve_conj(), u.stride()) for u in (t if isinstance(t, tuple) else (t,))])
        except RuntimeError as e:
            found.append(str(e).strip())
    ours, eager = found
    assert type(ours) is type(eager)
    if isinstance(eager, str):
        assert ours == eager
        return
    for (a, sa), (b, sb) in zip(ours, eager, strict=True):
        torch.testing.assert_close(a, b)
        assert sa == sb
