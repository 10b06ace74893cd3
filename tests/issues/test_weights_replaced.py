"""Weights that are replaced between calls: by other tensors, by other memory, by what torch swaps them with."""
import pytest
import torch
import vitrify
from torch import nn


def ones(t):
    return torch.full((4, 4), 0.5, dtype=t.dtype)


def swap(m):
    torch.utils.swap_tensors(m.weight, nn.Parameter(ones(m.weight)))


def swap_grads_too(m):
    other = nn.Parameter(ones(m.weight))
    other.grad = torch.ones_like(other)
    torch.utils.swap_tensors(m.weight, other)


def swap_conversion(m):
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        m.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def conversion(m):
    m.double()


def assign(m):
    m.weight = nn.Parameter(ones(m.weight))


def assign_to_the_dict(m):
    m._parameters["weight"] = nn.Parameter(ones(m.weight))


def set_data(m):
    m.weight.set_(ones(m.weight)) if not torch.is_grad_enabled() else setattr(m.weight, "data", ones(m.weight))


def load(m):
    m.load_state_dict({"weight": ones(m.weight), "bias": m.bias.detach().clone()}, assign=True)


def load_and_copy(m):
    m.load_state_dict({"weight": ones(m.weight), "bias": m.bias.detach().clone()})


def register(m):
    m.register_parameter("weight", nn.Parameter(ones(m.weight)))


def copy(m):
    with torch.no_grad():
        m.weight.copy_(ones(m.weight))


def freeze(m):
    m.weight.requires_grad_(False)


WAYS = [swap, swap_grads_too, swap_conversion, conversion, assign, assign_to_the_dict, set_data, load, load_and_copy, register, copy, freeze]


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "within"])
@pytest.mark.parametrize("way", WAYS, ids=[w.__name__ for w in WAYS])
def test_between_calls(way, nested, grad):
    results = []
    for compiled in (True, False):
        torch.manual_seed(0)
        m = nn.Linear(4, 4)
        whole = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), m) if nested else m
        f = vitrify.compile(whole, fullgraph=True) if compiled else whole
        results.append([])
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                x = torch.ones(2, 4, dtype=m.weight.dtype)
                out = f(x)
                if grad:
                    out.sum().backward()
                results[-1].append([out.detach(), *(None if p.grad is None else p.grad.clone() for p in whole.parameters())])
                del out
                whole.zero_grad()
                way(m) if len(results[-1]) == 1 else None
                if way in (swap_conversion, conversion):
                    whole.double()
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_a_tensor_that_a_function_reaches(grad):
    """What is no module's: a function's own variable."""
    results = []
    for compiled in (True, False):
        w = torch.arange(4.0).requires_grad_()
        fn = lambda x: (x * w).sin()  # noqa: E731, B023
        f = vitrify.compile(fn, fullgraph=True) if compiled else fn
        results.append([])
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                out = f(torch.ones(4))
                results[-1].append(out.detach())
                if grad:
                    out.sum().backward()
                    results[-1].append(w.grad.clone())
                del out
                w.grad = None
                torch.utils.swap_tensors(w, torch.full((4,), 0.5).requires_grad_())
    torch.testing.assert_close(*results)


def swapped(m, way):
    """What torch says of a swap, and what comes of a backward after it."""
    try:
        way(m)
    except RuntimeError:
        return "refused"
    return [p.dtype for p in m.parameters()]


@pytest.mark.parametrize("way", [swap, swap_conversion], ids=["swap", "swap_conversion"])
@pytest.mark.parametrize("how", ["went back", "not yet", "gradient of a gradient"])
def test_beside_a_result(how, way):
    """A result whose backward has run holds no weight."""
    results = []
    for compiled in (True, False):
        torch.manual_seed(0)
        m = nn.Linear(4, 4)
        f = vitrify.compile(m, fullgraph=True) if compiled else m
        x = torch.ones(2, 4, requires_grad=how == "gradient of a gradient")
        out = f(x)
        if how == "went back":
            out.sum().backward()
        if how == "gradient of a gradient":
            g, = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            g.square().sum().backward()
            del g
        m.zero_grad()
        results.append([out.detach(), swapped(m, way)])
        if how == "went back":
            del x
            results[-1].append(f(torch.ones(2, 4, dtype=m.weight.dtype)).detach())
        del out
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    torch.testing.assert_close(results[0][2:], results[1][2:])


def test_weights_given_that_the_program_reaches_as_well():
    """What a capture could have met and has not it does not hold."""
    def run(compiled):
        m = nn.Linear(4, 4)
        call = lambda weights, x: torch.func.functional_call(m, weights, (x,))  # noqa: E731
        f = vitrify.compile(call, fullgraph=True) if compiled else call
        weights = {"weight": ones(m.weight).requires_grad_(), "bias": m.bias}
        out = f(weights, torch.ones(2, 4))
        out.sum().backward()
        del out
        return [t._use_count() for t in (m.weight, m.bias, weights["weight"])]
    assert run(True) == run(False)
