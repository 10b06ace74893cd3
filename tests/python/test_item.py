"""x.item() of what the program computes: its arithmetic is compiled in double, and what would need the number itself runs eagerly."""
import collections
import logging.handlers
import math
import warnings

import expects
import pytest
import torch
import vitrify

ARITHMETIC = {
    "operand": lambda x, n: x * n,
    "its arithmetic": lambda x, n: x + (n * 0.1 - 3 + 2 / 7.0) / 3.0,
    "negated": lambda x, n: x - -n,
    "two of them": lambda x, n: x * (n * x.max().item()) + n,
    "max": lambda x, n: x / max(1.0, n / 4.0),
    "max as a divisor": lambda x, n: x * (n / -max(0.5, n)),
    "min of three": lambda x, n: x * min(n, 0.5, x.min().item()),
    "of doubles": lambda x, n: x.double() * n,
    "of integers": lambda x, n: torch.arange(3) * n + torch.arange(3),
    "of a 0-d tensor": lambda x, n: x[0, 0] * n,
    "alpha": lambda x, n: torch.add(x, x, alpha=n / 2),
    "clamp": lambda x, n: x.clamp(max=n),
    "full": lambda x, n: torch.full((2, 2), n) + torch.full_like(x[:2, :2], n),
    "power": lambda x, n: x.abs() ** n,
    "in place": lambda x, n: x.clone().mul_(n).add_(n),
    "comparison of tensors": lambda x, n: (x > n, torch.where(x > 0, n, 0.0)),
    "foreach": lambda x, n: torch._foreach_mul([x, x + 1], [n, 2.0]),
}


def beside(fn, inputs, *, eager=None):
    """Compiled, or eager with one warning that says `eager`."""
    if eager is not None:
        expects.eager(eager)
    compiled, start = vitrify.compile(fn), dict(vitrify.counters)
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        for x in inputs:
            torch.testing.assert_close(compiled(x.clone()), fn(x.clone()), equal_nan=True)
    did = {k: v - start[k] for k, v in vitrify.counters.items()}
    messages = [str(w.message) for w in log if issubclass(w.category, vitrify.VitrifyWarning)]
    if eager is None:
        assert not messages and did["compiled_calls"] == len(inputs) and did["kernels_launched"] > 0 and did["captures"] == 1, (messages, did)
    else:
        assert did["compiled_calls"] == 0 and did["eager_calls"] == len(inputs) and len(messages) == 1 and eager in messages[0], (messages, did)


def inputs(dtype=torch.float32):
    """Their sums are exact, in whatever order a processor adds them."""
    return [(torch.randn(3, 5, generator=torch.Generator().manual_seed(i), dtype=dtype) * s * 1024).round() / 1024 for i, s in enumerate((1, 10, 0.01, 0))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name, dtype):
    beside(lambda x: ARITHMETIC[name](x, x.sum().item()), inputs(dtype))


def test_it_is_pythons_arithmetic():
    """In double, whatever the tensors are: to the last bit."""
    def fn(x):
        a, b = x[0].item(), x[1].item()
        return torch.full((), a * b + 0.1, dtype=torch.float64), torch.full((), (a - b) / 3.0, dtype=torch.float64), torch.full((), max(a, b) - min(a, b), dtype=torch.float64)
    compiled = vitrify.compile(fn)
    for i in range(5):
        x = torch.randn(2, generator=torch.Generator().manual_seed(i))
        assert [t.item() for t in compiled(x)] == [t.item() for t in fn(x)]
    assert vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0


def test_max_and_min_are_pythons_of_nan():
    def fn(x):
        a, b = x[0].item(), x[1].item()
        return tuple(torch.full((), v) for v in (max(a, b), max(b, a), min(a, b), min(b, a), max(1.0, a), max(a, 1.0), min(a, 1.0, b)))
    nan = math.nan
    beside(fn, [torch.tensor(v) for v in ([1.0, 2.0], [nan, 2.0], [1.0, nan], [nan, nan], [0.0, -0.0])])


def test_it_is_the_value_of_then():
    def fn(x):
        n = x.sum().item()
        x.zero_()
        return x + n
    beside(fn, inputs())


def test_no_gradient_goes_through_it():
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        out = vitrify.compile(lambda x: x * x.sum().item())(x)
    torch.testing.assert_close(out, x.detach() * x.sum().item())
    assert vitrify.counters["eager_calls"] == 0


kept = collections.deque(maxlen=2)
RUNS_EAGERLY = {
    "returned": lambda x: (x, x.sum().item()),
    "in a list": lambda x: [x, {"n": x.sum().item() * 2}],
    "compared": lambda x: x + 1 if x.sum().item() > 0 else x - 1,
    "float()": lambda x: x * float(x.sum().item()),
    "int()": lambda x: x * int(x.sum().item()),
    "formatted": lambda x: x * len(f"{x.sum().item()}"),
    "power of it": lambda x: x * x.sum().item() ** 2,
    "divided by it": lambda x: x + 1 / (x.sum().item() + 1),
    "an integer that max may give": lambda x: x * max(1, x.sum().item()),
    "max of a list": lambda x: x * max([1.0, x.sum().item()]),
    "math": lambda x: x * math.exp(x.sum().item()),
    "a weight of lerp": lambda x: x.lerp(x + 1, x.sum().item()),
}


@pytest.mark.parametrize("name", RUNS_EAGERLY)
def test_what_needs_the_number_runs_eagerly(name):
    reason = "lerp" if "lerp" in name else "has no attribute 'abs'" if name == "abs" else "reads a tensor's value: aten::item"
    beside(RUNS_EAGERLY[name], inputs()[:3], eager=reason)


def test_a_number_that_is_kept_runs_eagerly():
    """Wherever that is."""
    def fn(x):
        kept.append(x.sum().item())
        return x * kept[-1]
    beside(fn, inputs()[:3], eager="reads a tensor's value: aten::item")
    assert all(type(v) is float for v in kept)
    log = logging.getLogger("vitrify.test_item")
    handler = logging.handlers.MemoryHandler(10, flushLevel=logging.CRITICAL)
    log.addHandler(handler)

    def logs(x):
        log.error("%s", x.sum().item())
        return x * 2
    beside(logs, inputs()[:3], eager="reads a tensor's value: aten::item")


@pytest.mark.eager("reads a tensor's value: aten::item")
def test_with_gradients_it_runs_eagerly():
    fn = lambda x: x * x.sum().item()  # noqa: E731
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    with pytest.warns(vitrify.VitrifyWarning, match="reads a tensor's value: aten::item"):
        vitrify.compile(fn)(x).sum().backward()
    fn(y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_max_and_min_are_builtin_again():
    import builtins
    vitrify.compile(lambda x: x * max(1.0, x.sum().item()))(torch.ones(2))
    assert max is builtins.max and type(max) is type(len) and type(min) is type(len)
