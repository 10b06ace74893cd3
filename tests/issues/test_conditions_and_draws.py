"""What an adversary found of conditions, numbers and generators: each gave other numbers than eager."""
import pytest
import torch
import vitrify

CONDITIONS = {
    "counted": lambda x: x * [s == 5 for s in x.shape].count(True),
    "compared": lambda x: x * 2 if (x.shape[0] == 5) == True else x * 3,  # noqa: E712
    "unequal": lambda x: x * 2 if (x.shape[0] == 5) != (x.shape[1] == 3) else x * 3,
    "contained": lambda x: x * 2 if True in [s > 5 for s in x.shape] else x * 3,
    "summed": lambda x: x * (1 + sum(s > 4 for s in x.shape)),
    "as tuples": lambda x: x * 2 if (x.shape[0] == 5, x.shape[1] == 3) == (True, True) else x * 3,
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_of_sizes_are_compared(name):
    compiled = vitrify.compile(CONDITIONS[name], dynamic=True, fullgraph=True)
    for shape in [(6, 3), (5, 3), (5, 5), (4, 7)]:
        x = torch.arange(float(shape[0] * shape[1])).view(shape)
        torch.testing.assert_close(compiled(x), CONDITIONS[name](x), rtol=0, atol=0)


SQUARES = {
    "the largest less each": lambda x: (-x.square() + x.square().amax(1, keepdim=True)).sqrt(),
    "each less the largest": lambda x: x.square() + -x.square().max(),
    "negated": lambda x: x * x + (x * -x),
    "a product less itself": lambda x: (x * 1.1 + -(x * 1.1)).sqrt(),
}


@pytest.mark.parametrize("name", SQUARES)
def test_a_sum_with_a_product_rounds_the_product(name):
    """One rounding of both left what the other product had lost, whose root is NaN."""
    compiled = vitrify.compile(SQUARES[name], fullgraph=True)
    for seed in range(4):
        x = torch.randn(60, 80, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(compiled(x).isnan(), SQUARES[name](x).isnan())
        torch.testing.assert_close(compiled(x), SQUARES[name](x))


@pytest.mark.parametrize("fn", [
    lambda x: x.clamp(min=x[0].item()), lambda x: x.clamp(max=x[0].item()), lambda x: x.clamp(x[0].item(), x[1].item()),
    lambda x: x.clamp_min(x[0].item()), lambda x: x.clamp_max(x[0].item()), lambda x: x.clamp(min=x[1].item()),
], ids=["min", "max", "both", "clamp_min", "clamp_max", "a number"])
def test_bounds_that_are_nan(fn):
    for x in (torch.tensor([float("nan"), 1.0, 2.0]), torch.tensor([1.0, float("nan"), 0.0]), torch.tensor([2.0, 1.0, 3.0])):
        torch.testing.assert_close(vitrify.compile(fn)(x), fn(x), equal_nan=True)


def drawn_again(x, g):
    state = g.get_state()
    first = torch.randn(3, generator=g)
    g.set_state(state)
    return torch.randn(3, generator=g) - first + x


def drawn_after(x, g):
    first = torch.randn(3, generator=g)
    g.manual_seed(3)
    return first + x


@pytest.mark.eager("sets the state of a random number generator", some=True)
@pytest.mark.parametrize("fn", [drawn_again, drawn_after, lambda x, g: torch.rand(3, generator=g) + torch.randn(3, generator=g) * x], ids=["again", "seeded after", "only drawn"])
def test_a_generator_that_is_given(fn):
    compiled, seen = vitrify.compile(fn), []
    for f in (compiled, fn):
        g = torch.Generator().manual_seed(7)
        seen.append([f(torch.ones(3), g) for _ in range(3)] + [g.get_state(), torch.rand(2, generator=g)])
    torch.testing.assert_close(*seen, rtol=0, atol=0)


def test_memory_that_grows_is_filled_in_deterministic_mode():
    def fn(x):
        y = x.clone()
        y.resize_(5)
        return y + 0
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(vitrify.compile(fn, fullgraph=True)(torch.ones(3)), fn(torch.ones(3)), equal_nan=True)
    finally:
        torch.use_deterministic_algorithms(False)


NUMBERS = {
    "fill": lambda x, v: torch.empty_like(x).fill_(v.item()),
    "filled": lambda x, v: torch.fill(x, v.item()) + x,
    "full_like": lambda x, v: torch.full_like(x, v.item()),
    "masked_fill": lambda x, v: x.masked_fill(x > 1, v.item()),
    "clamp": lambda x, v: x.clamp(min=v.item()),
    "clamp_max": lambda x, v: x.clamp_max(v.item() * 2),
    "addcmul": lambda x, v: torch.addcmul(x, x, x, value=v.item()),
    "added": lambda x, v: x + v.item() * x,
}


@pytest.mark.eager("aten::item", "takes a number that changes from call to call", some=True)
@pytest.mark.parametrize("name, dtype", [(n, d) for n in NUMBERS for d in (torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.uint8, torch.bool)
                                         if (n, d) != ("addcmul", torch.bool)])  # that raises with any number
def test_numbers_that_do_not_fit(name, dtype):
    """Eager raises where the type has no such value; the one that was captured had one."""
    def outcome(f, v):
        try:
            return f(torch.tensor([0, 1, 2, 3]).to(dtype), torch.tensor(v, dtype=torch.float64))
        except RuntimeError as e:
            return str(e).partition("\n")[0]
    fn, compiled = NUMBERS[name], vitrify.compile(NUMBERS[name])
    for v in (2.0, 1e30, 300.0, 1e300, float("nan"), float("inf"), -float("inf"), -1e30, 3.0):
        expected, got = outcome(fn, v), outcome(compiled, v)
        if isinstance(expected, str):
            assert got == expected, v
        else:
            torch.testing.assert_close(got, expected, equal_nan=True, msg=lambda m: f"{v}: {m}")


KNOWN_LATE = {
    "alpha": lambda x, k: torch.add(x, x, alpha=x.sum().item() * k), "in place": lambda x, k: x.clone().add_(x, alpha=x.sum().item() * k), "of doubles": lambda x, k: x.add(x, alpha=(x.double() * k).sum().item()),
    "full_like": lambda x, k: torch.full_like(x, x.sum().item() * k), "full": lambda x, k: torch.full((3,), -x.sum().item() * k), "addcmul": lambda x, k: torch.addcmul(x, x, x, value=x.sum().item() * k),
    "clamp": lambda x, k: x.clamp(max=x.sum().item() * k), "where": lambda x, k: torch.where(x > 2, x, x.sum().item() * k), "unread": lambda x, k: (x.add(x, alpha=x.sum().item() * k), x * 2)[1],
    "behind a write": lambda x, k: x.mul_(2).clone().add_(x, alpha=x.sum().item() * k), "in range": lambda x, k: torch.add(x, x, alpha=max(x.sum().item(), 2.0)) * k,
}


@pytest.mark.parametrize("name", KNOWN_LATE)
def test_numbers_that_the_graph_computes_are_floats(name):
    """What is beyond float32 raises where eager converts it, after the writes that eager has made by then."""
    def outcome(f, x, k):
        try:
            return f(x, k)
        except RuntimeError as e:
            return str(e).partition("\n")[0]
    compiled, raised = vitrify.compile(KNOWN_LATE[name]), 0
    for k in (1.0, 1e38, 1e39, float("inf"), 2.0):
        x, y = torch.ones(3), torch.ones(3)
        with torch.no_grad():
            got, expected = outcome(compiled, x, k), outcome(KNOWN_LATE[name], y, k)
        assert torch.equal(x, y)
        if isinstance(expected, str):
            assert got == expected, k
            raised += 1
        else:
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert (raised > 0) == (name != "in range")


LARGE = {
    "times": lambda x: x * float(x.shape[0] * 2**61 % 1000),
    "plus": lambda x: x + (x.shape[0] + (2**63 - 2)) % 10,
    "to a power": lambda x: x + x.shape[0]**30 % 7,
    "compared": lambda x: x + 1 if x.shape[0] * 2**62 > 0 else x - 1,
    "less": lambda x: x + 1 if -x.shape[0] - (2**63 - 3) < 0 else x - 1,
    "product": lambda x: x + (x.shape[0] * 2**29) * (x.shape[0] * 2**30) // 2**59,
}


@pytest.mark.eager("computes with an integer of more than 64 bits", some=True)
@pytest.mark.parametrize("name", LARGE)
def test_integers_without_end(name):
    compiled = vitrify.compile(LARGE[name], dynamic=True)
    for n in (3, 5, 9, 12):
        x = torch.arange(float(n))
        torch.testing.assert_close(compiled(x), LARGE[name](x), rtol=0, atol=0)
