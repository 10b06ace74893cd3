"""torch.distributions, whose checks of arguments read tensors: compiled as if they held, and eager's error where they do not."""
import math

import pytest
import torch
import vitrify
from torch import distributions as d


@pytest.fixture(autouse=True)
def checks():
    """As torch has them until something imports torch._dynamo, which switches them off."""
    before = d.Distribution._validate_args
    d.Distribution.set_default_validate_args(True)
    yield
    d.Distribution.set_default_validate_args(before)


KINDS = {
    "categorical": (lambda x: d.Categorical(logits=x), lambda x: torch.arange(x.shape[0]) % x.shape[1]),
    "probabilities": (lambda x: d.Categorical(x.softmax(-1)), lambda x: torch.arange(x.shape[0]) % x.shape[1]),
    "normal": (lambda x: d.Normal(x, x.exp()), lambda x: x.detach() * 0.5),
    "independent": (lambda x: d.Independent(d.Normal(x, 1.0), 1), lambda x: x.detach() * 0.5),
    "bernoulli": (lambda x: d.Bernoulli(logits=x), lambda x: (x > 0).to(x.dtype)),
    "beta": (lambda x: d.Beta(x.exp(), 2.0), lambda x: x.detach().sigmoid()),
}


def log_prob(kind):
    make, _ = KINDS[kind]

    def fn(x, value):
        p = make(x)
        return p.log_prob(value)
    return fn


def leaf(seed):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("kind", KINDS)
def test_checks_that_hold(kind, delta, no_warnings):
    fn = log_prob(kind)
    compiled = vitrify.compile(fn)
    for seed in range(3):
        runs = []
        for f in (compiled, fn):
            x = leaf(seed)
            y = f(x, KINDS[kind][1](x))
            y.sum().backward()
            runs.append((y.detach(), x.grad))
        torch.testing.assert_close(*runs)
    assert delta.captures == 1 and delta.compiled_calls == 6 and delta.eager_calls == 0 and delta.kernels_launched > 0


@pytest.mark.eager("a value that the program reads is another")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_check_that_fails(mode, delta, no_warnings):
    """Eager's error, at the first call and later, and compiled again after it."""
    fn = log_prob("categorical")
    compiled = vitrify.compile(fn)
    good, bad = torch.arange(6) % 4, torch.arange(6)
    for value in (bad, good, bad, good):
        told = []
        for f in (compiled, fn):
            with mode():
                try:
                    told.append(f(leaf(1), value).detach().clone())
                except ValueError as e:
                    told.append(str(e))
        if value is bad:
            assert told[0] == told[1] and "to be within the support" in told[0]
        else:
            torch.testing.assert_close(*told)
    assert delta.captures == 1 and delta.eager_calls == 2


@pytest.mark.eager("a value that the program reads is another")
def test_parameters_that_are_not_allowed(delta, no_warnings):
    compiled = vitrify.compile(lambda x, s: d.Normal(x, s).rsample())
    x, ones = torch.zeros(3), torch.ones(3)
    state = torch.get_rng_state()
    with torch.no_grad():
        compiled(x, ones)
        after = torch.get_rng_state()
        for _ in range(2):
            with pytest.raises(ValueError, match="Expected parameter scale"):
                compiled(x, -ones)
        assert torch.equal(torch.get_rng_state(), after)  # eager raises before it draws
        torch.set_rng_state(state)
        same = compiled(x, ones)
        torch.set_rng_state(state)
        assert torch.equal(same, d.Normal(x, ones).rsample())
    assert delta.compiled_calls >= 2 and delta.eager_calls == 2


def test_acting(delta, no_warnings):
    """Samples are eager's, and so is the state of the generator after them."""
    def act(x):
        p = d.Categorical(logits=x)
        a = p.sample()
        return a, p.log_prob(a), p.entropy()
    compiled, runs = vitrify.compile(act), []
    for f in (compiled, act):
        torch.manual_seed(5)
        with torch.no_grad():
            runs.append([f(leaf(i)) for i in range(4)])
        runs[-1].append(torch.get_rng_state())
    torch.testing.assert_close(*runs)
    assert delta.captures == 1 and delta.compiled_calls == 4 and delta.eager_calls == 0


@pytest.mark.eager("a value that the program reads is another")
@pytest.mark.parametrize("write", [lambda x, y: x.add_(y), lambda x, y: y.sum().backward()], ids=["input", "gradient"])
def test_a_check_that_fails_leaves_nothing_behind(write, delta):
    """Nothing has been written when it is looked at: eager begins anew, and raises where it does."""
    scale = torch.ones(3, requires_grad=True)

    def fn(x, value):
        write(x, d.Normal(x.detach().clone(), scale).log_prob(value) if write.__code__.co_names == ("sum", "backward") else d.Normal(x.clone(), 1.0).log_prob(value))
        return x * 2
    compiled, runs = vitrify.compile(fn), []
    good, bad = torch.ones(3), torch.full((3,), math.nan)
    for f in (compiled, fn):
        x, seen = torch.zeros(3), []
        scale.grad = torch.zeros(3)
        for value in (good, bad, good, good):
            try:
                seen.append(f(x, value))
            except ValueError as e:
                seen.append(str(e).partition("\n")[0])
        runs.append((seen, x, scale.grad))
    assert [type(v) for v in runs[0][0]] == [type(v) for v in runs[1][0]] and runs[0][0][1] == runs[1][0][1]
    torch.testing.assert_close([v for v in runs[0][0] if isinstance(v, torch.Tensor)], [v for v in runs[1][0] if isinstance(v, torch.Tensor)])
    torch.testing.assert_close(runs[0][1:], runs[1][1:])
    assert delta.compiled_calls == 3
