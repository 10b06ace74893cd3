"""Fused optimizers of halves, of several types and with tensors for numbers: what they compute, the loop over the parameters rounds at each step."""
import expects
import pytest
import torch
import vitrify
from torch import optim

HALF, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def stepped(compile, make, dtype, size, grads=4, spoil=None):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(40, dtype=F64).to(dtype))
    o = make(p)
    step, made = compile(o.step), []
    for k in range(grads):
        p.grad = (torch.randn(40, dtype=F64) * size).to(dtype)
        if k == 2 and spoil:
            o.state[p][spoil] = o.state[p][spoil].double()
        try:
            step()
        except RuntimeError as e:
            made.append(str(e).partition("\n")[0])
        made += [p.detach().clone(), *(v.clone() for v in o.state[p].values() if isinstance(v, torch.Tensor))]
    return made


def same(*args, **kwargs):
    expects.eager("it writes Python state, as caches do at first", some=True)
    ours, eager = (stepped(compile, *args, **kwargs) for compile in (vitrify.compile, lambda f: f))
    assert [type(v) for v in ours] == [type(v) for v in eager]
    for a, b in zip(ours, eager):
        if isinstance(b, str):
            assert a == b
        else:
            torch.testing.assert_close(a, b, equal_nan=True)


MAKES = {
    "adamw": lambda p, lr: optim.AdamW([p], lr=lr, fused=True), "adam": lambda p, lr: optim.Adam([p], lr=lr, weight_decay=0.1, amsgrad=True, fused=True),
    "adagrad": lambda p, lr: optim.Adagrad([p], lr=lr, lr_decay=0.1, fused=True), "sgd": lambda p, lr: optim.SGD([p], lr=lr, momentum=0.9, nesterov=True, fused=True),
}


HALVES = MAKES | {"sgd": lambda p, lr: optim.SGD([p], lr=lr, fused=True)}  # with momentum, eager's reads memory that nothing has been written to


@pytest.mark.parametrize("make", HALVES)
@pytest.mark.parametrize("dtype,size", [(HALF, 1e-3), (HALF, 1.0), (BF16, 1.0)], ids=str)
def test_halves(make, dtype, size):
    expects.eager("a fused optimizer computes in another type")
    same(lambda p: HALVES[make](p, 0.1), dtype, size)


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("dtype,lr", [(F64, F32), (F32, BF16), (F32, F32), (F32, F64), (F64, F64)], ids=str)
def test_rates_that_are_tensors(make, dtype, lr):
    before = vitrify.counters["kernels_launched"]
    if lr not in (dtype, F64):
        expects.eager("a fused optimizer computes in another type")
    same(lambda p: MAKES[make](p, torch.tensor(0.1, dtype=lr)), dtype, 1.0)
    assert lr not in (dtype, F64) or vitrify.counters["kernels_launched"] > before


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_they_compile(make, dtype):
    before = dict(vitrify.counters)
    same(lambda p: MAKES[make](p, 0.1), dtype, 1.0)
    assert all(vitrify.counters[name] > before[name] for name in ("compiled_calls", "kernels_launched"))


@pytest.mark.parametrize("make,spoil", [("sgd", "momentum_buffer"), ("adagrad", "sum"), ("adamw", "exp_avg")])
def test_state_of_another_type(make, spoil):
    same(lambda p: MAKES[make](p, 0.1), F32, 1.0, spoil=spoil)
