"""Networks that people train, unmodified: one step compiled beside eager beside fp64, and loss curves of twenty."""
import copy
import importlib.util
import warnings

import networks
import pytest
import torch
import vitrify
from networks import zoo
from vitrify import measure

PACKAGE = {"torchvision": "torchvision", "timm": "timm", "transformers": "transformers", "pyg": "torch_geometric"}
pytestmark = [pytest.mark.network, pytest.mark.filterwarnings("ignore")]


def params(names):
    for name in names:
        yield pytest.param(zoo.ZOO[name], id=name, marks=[] if name in networks.QUICK else [pytest.mark.slow])


def present(entry):
    package = PACKAGE[entry.name.split("/")[0]]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def step(f, module, args, kwargs):
    torch.manual_seed(3)
    module.zero_grad()
    loss = networks.loss_of(f(*args, **kwargs))
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in module.named_parameters()}, **{n: b.clone() for n, b in module.named_buffers()}}


def moved(module, args, kwargs, seed):
    """How far eager's own results go when the weights move by a rounding: what no float32 computation can know better."""
    from compare import steps
    other = copy.deepcopy(module)
    with torch.no_grad():
        for i, p in enumerate(other.parameters()):
            if p.is_floating_point():
                p.mul_(steps(p, seed * 1000 + i))
    return step(other, other, args, kwargs)


@pytest.mark.parametrize("entry", params(n for n in zoo.ZOO if n not in networks.LEFT_OUT))
def test_a_step(entry):
    """Loss, every gradient and every statistic: at most twice as far from fp64 as eager, whose distance is that of float32 runs of the same weights up to a rounding."""
    present(entry)
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
    random = any("dropout" in type(m).__name__.lower() or "drop" in type(m).__name__.lower() for m in module.modules())
    if random:
        reference = theirs  # the same draws, but no fp64 run of them
    else:
        reference = step(wide.double(), wide, measure.to_double(tuple(args)), measure.to_double(kwargs))
    runs = [moved(fresh, args, kwargs, s) for s in (1, 2)]
    largest = max(v.double().abs().max().item() for v in reference.values() if v is not None and v.is_floating_point() and v.numel())
    for name in mine:
        a, e = mine[name], theirs[name]
        assert (a is None) == (e is None), name
        if a is None:
            continue
        assert a.dtype == e.dtype and a.shape == e.shape and a.stride() == e.stride(), name
        if not e.is_floating_point():
            assert torch.equal(a, e), name
            continue
        # A gradient that is nothing but rounding (of a bias before a norm) is known as well as the sums that cancel in it.
        r = reference[name]
        size = r.abs().max().item() if r.abs().max() >= 1e-9 * largest else largest
        distance = lambda t: (t.double() - r).abs().max().item() / max(size, 1e-30)  # noqa: E731, B023
        known = lambda: max(distance(e), *(distance(run[name]) for run in runs))  # noqa: E731, B023
        allowed = lambda: (3 if random else 2) * known() + 8 * torch.finfo(torch.float32).eps  # noqa: E731, B023
        # Where a rounding decides which way a ReLU or a maximum goes, few runs may all go one way.
        while distance(a) > allowed() and len(runs) < 10:
            runs.append(moved(fresh, args, kwargs, len(runs) + 1))
        assert distance(a) <= allowed(), f"{name}: {distance(a):.2e} from {'eager' if random else 'fp64'}, eager {known():.2e}"
    did = measure.counted(lambda: step(compiled, ours, args, kwargs))
    assert did["compiled_calls"] >= 2 and did["eager_calls"] == did["fallbacks"] == 0, did
    forward = measure.counted(lambda: networks.loss_of(compiled(*args, **kwargs)))
    assert 0 < forward["kernels_launched"] < did["kernels_launched"], (forward, did)


CURVES = ["torchvision/resnet18", "torchvision/mobilenet_v3_small", "timm/vit_tiny_patch16_224", "timm/convnextv2_atto", "transformers/bert", "transformers/gpt2", "transformers/llama", "pyg/GCN", "pyg/GraphSAGE"]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("entry", params(CURVES))
def test_the_loss_curve(entry, optimizer):
    curve(entry, optimizer, False)


@pytest.mark.slow
@pytest.mark.parametrize("entry", params(["timm/vit_tiny_patch16_224", "transformers/gpt2", "transformers/bert"]))
def test_the_loss_curve_in_bfloat16(entry):
    curve(entry, "adamw", True)


def curve(entry, optimizer, half):
    present(entry)
    module, args, kwargs = networks.build(entry)
    networks.without_dropout(module)
    curves = []
    for run in ("ours", "eager"):
        m = copy.deepcopy(module)
        f = vitrify.compile(m) if run == "ours" else m
        torch.manual_seed(3)
        o = torch.optim.SGD(m.parameters(), 1e-3) if optimizer == "sgd" else torch.optim.AdamW(m.parameters(), 1e-4)
        losses, before = [], dict(vitrify.counters)
        for _ in range(20):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = networks.loss_of(f(*args, **kwargs))
            o.zero_grad()
            loss.backward()
            o.step()
            losses.append(loss.item())
        if run == "ours":
            did = {k: v - before[k] for k, v in vitrify.counters.items()}
            assert did["compiled_calls"] == 40 and did["eager_calls"] == did["fallbacks"] == 0 and did["captures"] == 1, did
        curves.append(torch.tensor(losses))
    ours, eager = curves
    assert eager[-1] < eager[0], "the network learns nothing"
    torch.testing.assert_close(ours, eager, rtol=0.05 if half else 2e-3, atol=1e-2 if half else 1e-4)


def test_there_are_enough():
    assert len([n for n in zoo.ZOO if n not in networks.LEFT_OUT]) >= 40
