"""What eager makes of no elements, or refuses; and a placeholder's error that a program catches."""
import expects
import pytest
import torch
import vitrify

aten = torch.ops.aten


def outcome(f, x):
    try:
        return f(x)
    except (RuntimeError, IndexError, ValueError) as e:
        return str(e).partition("\n")[0]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.no_kernels("ATen computes moments of nothing, or nothing is launched", some=True)
@pytest.mark.parametrize("correction", [-5, -1, 0, 1])
@pytest.mark.parametrize("shape, dim", [((0,), None), ((0, 5), 0), ((0, 5), None), ((3, 0), 1)])
def test_variance(shape, dim, correction):
    for f in (lambda x: x.var(dim, correction=correction), lambda x: x.std(dim, correction=correction),
              lambda x: x[x > 2].var(correction=correction) + torch.var_mean(x, dim, correction=correction)[0]):
        for dtype in (torch.float32, torch.float64):
            x = torch.ones(shape, dtype=dtype)
            torch.testing.assert_close(vitrify.compile(f)(x), f(x), equal_nan=True)
    for f in (lambda x: x[x > 0].var(correction=correction), lambda x: x[x > 0].std(0, correction=correction)):
        compiled = vitrify.compile(f)
        for x in (torch.tensor([1.0, 3.0, 7.0]), -torch.ones(3), torch.tensor([1.0, 3.0, -7.0])):
            torch.testing.assert_close(compiled(x), f(x), equal_nan=True)


NORMS = {
    "native_batch_norm": lambda x: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0] * 2,
    "without statistics": lambda x: aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5)[0] * 2,
}


@pytest.mark.eager("a size that follows from content is not what the plan is for", some=True)
@pytest.mark.parametrize("norm", NORMS)
def test_batch_norm(norm):
    f = lambda x: NORMS[norm](x[x[:, 0] > 0])  # noqa: E731
    compiled = vitrify.compile(f)
    for x in (torch.rand(4, 3) + 1, -torch.ones(4, 3), torch.empty(0, 3), torch.rand(5, 3) + 1):
        given, wanted = outcome(compiled, x), outcome(f, x)
        assert given == wanted if isinstance(wanted, str) else torch.allclose(given, wanted, rtol=1.3e-6, atol=1e-5)


def test_sizes_that_do_not_fit():
    expects.no_kernels("the program raises")
    f = lambda g: aten._softmax_backward_data(g, torch.rand(5), 0, torch.float32)  # noqa: E731
    for dynamic in (None, True):
        assert outcome(vitrify.compile(f, dynamic=dynamic), torch.ones(1)) == outcome(f, torch.ones(1))


def test_data_of_an_intermediate():
    expects.eager("assigns to the .data of a tensor")

    def f(x):
        y = x * 2
        try:
            y.data = y + 1
        except RuntimeError:
            return x - 1
        return y

    assert torch.equal(vitrify.compile(f)(torch.ones(3)), torch.full((3,), 3.0))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_table_without_rows(mode):
    expects.no_kernels("the program raises")
    f = lambda x: torch.nn.functional.embedding_bag(torch.tensor([[0, 0]]), x, mode=mode)  # noqa: E731
    for needs in (False, True):
        x = torch.randn(0, 4, requires_grad=needs)
        assert outcome(vitrify.compile(f), x) == outcome(f, x)
