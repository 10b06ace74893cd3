"""Networks that people train, unmodified: one step compiled beside eager beside fp64."""
import contextlib
import copy
import warnings

import curves
import networks
import pytest
import torch
import vitrify
from networks import zoo
from vitrify import measure

pytestmark = [pytest.mark.network, pytest.mark.filterwarnings("ignore")]


def params(names):
    for name in names:
        yield pytest.param(zoo.ZOO[name], id=name, marks=[] if name in networks.QUICK else [pytest.mark.slow])


def step(f, module, args, kwargs, jolts=contextlib.nullcontext()):
    torch.manual_seed(3)
    module.zero_grad()
    with jolts:
        loss = networks.loss_of(f(*args, **kwargs))
        loss.backward()
    found = {"loss": loss.detach(), **{f"gradient {n}": p.grad for n, p in module.named_parameters()}}
    return {**found, **{f"statistic {n}": b.clone() for n, b in module.named_buffers()}}


def channels_last(t):
    return t.contiguous(memory_format=torch.channels_last) if torch.is_tensor(t) and t.dim() == 4 else t


@pytest.mark.eager("it writes Python state, as caches do at first", some=True)
@pytest.mark.parametrize("entry", params(n for n in zoo.ZOO if n not in networks.LEFT_OUT))
def test_a_step(entry):
    """Loss, every gradient and every statistic."""
    networks.present(entry)
    module, args, kwargs = networks.build(entry)
    ours, wide = copy.deepcopy(module), copy.deepcopy(module)
    fresh = copy.deepcopy(module)
    compiled = vitrify.compile(ours)
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        mine = step(compiled, ours, args, kwargs)
        state = torch.get_rng_state()
    reasons = [str(w.message)[:300] for w in log if issubclass(w.category, vitrify.VitrifyWarning)]
    assert not reasons, reasons
    theirs = step(module, module, args, kwargs)
    assert torch.equal(state, torch.get_rng_state())
    random = any("drop" in type(m).__name__.lower() for m in module.modules())
    if random:
        reference = theirs  # the same draws, but no fp64 run of them
    else:
        reference = step(wide.double(), wide, measure.to_double(tuple(args)), measure.to_double(kwargs))

    def run(seed):
        other = curves.moved(copy.deepcopy(fresh), seed)
        if seed % 2 and any(isinstance(m, torch.nn.Conv2d) for m in other.modules()) and entry.name != "timm/repvgg_a0":
            # Convolutions are compiled in this layout (one network dies of it in eager: tests/issues/test_layout.py).
            other = other.to(memory_format=torch.channels_last)
            return step(other, other, tuple(map(channels_last, args)), kwargs, curves.jolted(seed))
        return step(other, other, args, kwargs, curves.jolted(seed))
    curves.Judge(theirs, reference, run, factor=3 if random else 2).check(mine)
    did = measure.counted(lambda: step(compiled, ours, args, kwargs))
    assert did["compiled_calls"] >= 2 and did["eager_calls"] == did["fallbacks"] == 0, did
    forward = measure.counted(lambda: networks.loss_of(compiled(*args, **kwargs)))
    assert 0 < forward["kernels_launched"] < did["kernels_launched"], (forward, did)


@pytest.mark.no_kernels("nothing is compiled")
def test_there_are_enough():
    assert len([n for n in zoo.ZOO if n not in networks.LEFT_OUT]) >= 40
