"""What a program computes from sizes: integers and floats as Python's, also where divisors are negative, and its exceptions."""
import math

import pytest
import torch
import vitrify

INF = float("inf")


def same(f, *shapes):
    compiled = vitrify.compile(f, dynamic=True)
    for shape in shapes:
        x = torch.ones(shape)
        try:
            want = f(x)
        except Exception as e:
            with pytest.raises(type(e)) as got:
                compiled(x)
            assert str(got.value) == str(e)
        else:
            got = compiled(x)
            assert got.shape == want.shape
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            if not want.is_complex():
                assert torch.equal(got.signbit(), want.signbit())


SHAPES = (3, 7), (6, 2), (5, 13), (2, 9), (9, 3)


@pytest.mark.parametrize("f", [
    lambda x: x.new_ones(-((2 * x.shape[0] + 1) // -(2 * x.shape[1]))) * 2,
    lambda x: x * ((2 * x.shape[0] + 1) // (2 * x.shape[1] - 20)),
    lambda x: x[:, :(2 * x.shape[0] + 1) % (2 * x.shape[1] - 20) + 40] * 1,
    lambda x: x * ((2 * x.shape[0] + 1) % (2 * x.shape[1] - 20)),
    lambda x: x * ((4 * x.shape[0] * x.shape[1] + 3) // (-4 * x.shape[0])),
    lambda x: x * ((4 * x.shape[0] * x.shape[1] + 3) % (-4 * x.shape[0])),
    lambda x: x * ((6 * x.shape[0] - 4) // (6 - 3 * x.shape[1])),
    lambda x: x * ((x.shape[0] * x.shape[1] + x.shape[0] - 1) // (x.shape[0] * (8 - x.shape[1]) - x.shape[0] * 4 * x.shape[1])),
], ids=range(8))
def test_negative_divisors(f):
    same(f, *SHAPES)


@pytest.mark.parametrize("f", [
    lambda x: x * ((x.shape[0] / 1) % 0.1),
    lambda x: x * ((x.shape[0] / 2) % INF),
    lambda x: x * ((x.shape[0] / 2) % -1.5),
    lambda x: x * ((x.shape[0] / -2) % 0.7),
    lambda x: x * (x.shape[0] / 1 // 0.5),
    lambda x: x * (x.shape[0] // 2.0),
    lambda x: x * (x.shape[0] / 3) ** 2.5 - (x.shape[1] * 1.0) ** -1,
    lambda x: x * math.floor(x.shape[0] / 2) + math.ceil(x.shape[1] / 4) - x.shape[0] / 7,
    lambda x: x.new_ones(int(x.shape[0] * 1.5), math.floor(x.shape[1] * 0.7)) * 2,
    lambda x: x * max(x.shape[0] / 2, 1.7) - min(x.shape[1] / 4, 1.0),
], ids=range(10))
def test_floats(f):
    same(f, *SHAPES)


@pytest.mark.eager("of its sizes", "rounding down", "more than 64 bits", some=True)
@pytest.mark.no_kernels("Python raises", some=True)
@pytest.mark.parametrize("f", [
    lambda x: x * ((x.shape[0] / 1) // 0.1),
    lambda x: x * ((x.shape[0] / -2) // INF),
    lambda x: x * (0.0 // (x.shape[0] / -2)),
    lambda x: x * (x.shape[0] / (x.shape[1] - 7)),
    lambda x: x * (x.shape[0] // (x.shape[1] - 7.0)),
    lambda x: x * (x.shape[0] % (x.shape[1] - 7.0)),
    lambda x: x * (x.shape[1] - 7.0) ** -1,
    lambda x: x * (x.shape[0] * 1.0) ** 1000,
    lambda x: x * (x.shape[1] / -2) ** 0.5,
    lambda x: x * math.floor(x.shape[0] * 1e30),
    lambda x: x * math.floor(x.shape[0] * INF),
], ids=range(11))
def test_floats_that_only_python_makes(f):
    same(f, *SHAPES)


@pytest.mark.parametrize("f", [
    lambda x: (lambda y: y[torch.arange(y.shape[0]) * 3 % y.shape[0]] * 1)(x.reshape(-1, x.shape[1] // 2, 2).flatten(1)),
    lambda x: (lambda y: y[torch.arange(y.shape[0]) * 5 % y.shape[0]] * 1)(torch.cat(x.chunk(2, 1)).reshape(-1, 2)),
], ids=range(2))
def test_indices_without_a_bound(f):
    same(f, (6, 8), (3, 4), (5, 12))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("numbers", [(2.5,), (0.0,), (1, 2.7), (0.5, 4, 0.3), (0, 1, 0.1), (3, 10, 2.0), (-1.5, 1.5), (2**62, 2**62 + 3)], ids=str)
def test_ranges(numbers, dtype):
    dtype = torch.float64 if dtype is None and numbers[-1] > 2**53 else dtype  # of integers by themselves the length is exact
    same(lambda x: torch.arange(*numbers, dtype=dtype) * 2 + x[0, 0], (2, 3))
    same(lambda x: torch.arange(0, x.shape[0] * 0.5, 0.5, dtype=dtype) * x[0, 0], *SHAPES)


def test_matrices_and_steps_of_sizes():
    for dtype in None, torch.float64, torch.int32, torch.bool:
        same(lambda x: torch.eye(x.shape[0], dtype=dtype) * 2, *SHAPES)
        same(lambda x: torch.eye(x.shape[0], x.shape[1] - 1, dtype=dtype) * x[0, 0], *SHAPES)
    for dtype in None, torch.float64, torch.int32:
        same(lambda x: torch.linspace(-1, 1, x.shape[1], dtype=dtype) * x, *SHAPES)
        same(lambda x: torch.linspace(0.5, x.shape[0], 5, dtype=dtype) * x[0, 0], *SHAPES)


SCALED = {
    "var": lambda x: x.var(0), "std": lambda x: x.std(0), "all": lambda x: x.var(), "biased": lambda x: x.std(0, unbiased=False), "var_mean": lambda x: torch.var_mean(x, 0)[0],
    "correction": lambda x: x.var(0, correction=2), "scores": lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5), "half": lambda x: x.double().std(1),
}


@pytest.mark.parametrize("name", SCALED)
def test_formulas_that_scale_gradients_by_sizes(name):
    """One plan is for all sizes."""
    def run(f, n):
        torch.manual_seed(n)
        x = torch.randn(n, 4, requires_grad=True)
        y = f(x)
        g, = torch.autograd.grad(y.sum() * 3, x, create_graph=True)
        return y, g, torch.autograd.grad(g.square().sum(), x)
    compiled = vitrify.compile(SCALED[name], dynamic=True)
    before = dict(vitrify.counters)
    for n in (5, 3, 8, 13, 4, 9, 7, 11, 6, 10):
        torch.testing.assert_close(run(compiled, n), run(SCALED[name], n))
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    assert did["captures"] == 1 and did["recompiles"] == did["eager_calls"] == 0 and did["kernels_launched"]


OF_ANY_SIZE = {
    "nansum": lambda x: x.nansum(0), "nanmean": lambda x: x.nanmean(0), "nansum of all": lambda x: x.t().nansum(), "nansum in double": lambda x: x.nansum(1, keepdim=True, dtype=torch.float64),
    "cummax": lambda x: x.cummax(0).values, "cummin": lambda x: (x.t() * 2).cummin(0).values, "which": lambda x: x * x.cummax(1).indices, "renorm": lambda x: x.renorm(2, 0, 1.0), "renorm of columns": lambda x: x.t().renorm(1, 1, 0.5), "pdist": lambda x: torch.pdist(x),
}


@pytest.mark.no_kernels("calls of libraries", some=True)
@pytest.mark.parametrize("name", OF_ANY_SIZE)
def test_calls_that_have_one_plan_for_all_sizes(name):
    def run(f, n):
        torch.manual_seed(n)
        x = torch.randn(n, 4)
        x[0, 1] = float("nan") if "nan" in name else 0
        x.requires_grad_()
        y = f(x)
        g, = torch.autograd.grad(y.sum() * 3, x)
        return y, y.stride(), g, g.stride()
    compiled = vitrify.compile(OF_ANY_SIZE[name], dynamic=True)
    before = dict(vitrify.counters)
    for n in (5, 3, 8, 13, 4, 9, 7, 11, 6, 10):
        torch.testing.assert_close(run(compiled, n), run(OF_ANY_SIZE[name], n), equal_nan=True)
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    assert did["captures"] == 1 and did["recompiles"] == did["eager_calls"] == 0


def test_no_elements_to_scale_by():
    compiled = vitrify.compile(lambda x: x.var(0, correction=3), dynamic=True)
    for n in (5, 3, 2, 4):
        x = torch.randn(n, 4, requires_grad=True)
        torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), torch.autograd.grad(x.var(0, correction=3).sum(), x), equal_nan=True)
