"""In inference mode a tensor that was made before stays an ordinary one, also when it is written: a custom op that takes derivatives of it, or keeps it, may."""
import pytest
import torch
import vitrify


@torch.library.custom_op("vitrify_tests::slope", mutates_args=())
def slope(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad((leaf.abs() ** 3).sum(), leaf)[0].detach()


@slope.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("vitrify_tests::is_made_in_inference", mutates_args=())
def made_in_inference(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.tensor([x.is_inference(), y.is_inference()])


@made_in_inference.register_fake
def _(x, y):
    return torch.empty(2, dtype=torch.bool)


def written(x):
    x.add_(1)
    return slope(x) * 2


def written_in_part(x):
    x[1:].mul_(3)
    return slope(x).sin() + slope(x[:2]).sum()


def view(x):
    return slope(x.t()) * 2


def given(x):
    return slope(x) * 2


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("f", [written, written_in_part, view, given])
def test_derivatives_of_what_was_made_before(f, dtype, dynamic):
    compiled = vitrify.compile(f, dynamic=dynamic)
    for rows in (3, 5, 3):
        found = []
        for g in (compiled, f):
            torch.manual_seed(rows)
            x = torch.randn(rows, 4, dtype=dtype)
            with torch.inference_mode():
                found.append((g(x), x))
            assert found[-1][0].is_inference()
        for ours, eager in zip(*found, strict=True):
            torch.testing.assert_close(ours, eager)


def both_kinds(cache, x):
    cache[0] = x.sum(0)
    return made_in_inference(cache, x), cache.sum()


def made_before(cache, x):
    cache[0] = x.sum(0)
    return made_in_inference(cache, cache[1:]), cache.sum()


@pytest.mark.parametrize("f", [both_kinds, made_before])
def test_a_cache_that_was_made_before(f):
    found = []
    for g in (vitrify.compile(f), f):
        cache, x = torch.zeros(4, 3), torch.ones(2, 3)
        with torch.inference_mode():
            found.append((*g(cache, x), cache))
    for ours, eager in zip(*found, strict=True):
        assert torch.equal(ours, eager)
