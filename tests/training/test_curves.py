"""Twenty steps of training, compiled beside eager: losses, first gradients, and statistics, parameters and optimizer state at the end."""
import warnings

import curves
import networks
import pytest
import torch
import vitrify
from networks import zoo

pytestmark = [pytest.mark.network, pytest.mark.filterwarnings("ignore")]

QUICK = {"transformers/gpt2", "pyg/GCN", "ppo"}
FORTY = [
    *(f"torchvision/{n}" for n in ("resnet18", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5", "squeezenet1_1", "regnet_y_400mf")),
    *(f"timm/{n}" for n in ("vit_tiny_patch16_224", "levit_128s", "convnextv2_atto", "edgenext_xx_small", "mobilevit_xxs", "poolformer_s12")),
    *(n for n in zoo.ZOO if n.startswith(("transformers/", "pyg/")) and n not in networks.LEFT_OUT),
    *curves.OWN,
]
# What AdamW keeps of mnasnet0_5 is chaos under autocast: eager's own runs are off by 1.5 times its largest value, ours by 4.7.
HALF = [n for n in FORTY if n != "torchvision/mnasnet0_5"]
MOMENTUM = ["torchvision/resnet18", "timm/convnextv2_atto", "transformers/gpt2", "transformers/bert", "pyg/GCN", "pyg/GraphSAGE", "diffusion_unet"]
DROPOUT = ["transformers/gpt2", "transformers/bert", "transformers/t5", "torchvision/mobilenet_v3_small"]
WHOLE = ["ppo_unchecked", "diffusion_unet", "diffusion_unet_that_draws", "transformers/llama"]


def params(names, quick=QUICK):
    for name in names:
        yield pytest.param(name, marks=[] if name in quick else [pytest.mark.slow])


@pytest.mark.parametrize("name", params(FORTY))
def test_adamw(name):
    check(name, "adamw")


@pytest.mark.parametrize("name", params(MOMENTUM, ()))
def test_momentum(name):
    check(name, "sgd")


@pytest.mark.parametrize("name", params(HALF, ("pyg/GCN",)))
def test_bfloat16(name):
    """Under autocast: at most three times as far from fp64 as eager under autocast."""
    check(name, "adamw", half=True)


@pytest.mark.parametrize("name", params(DROPOUT, ()))
def test_dropout(name):
    """Eager's draws, of which there is no fp64 run: from the same random state to the same random state."""
    check(name, "adamw", dropout=True)


@pytest.mark.eager("it writes Python state, as caches do at first: o.state")
@pytest.mark.parametrize("name", params(WHOLE, ("ppo_unchecked",)))
def test_a_whole_step(name):
    """Forward, backward, clipping and update as one compiled function; its first call runs eagerly, which makes the optimizer's state."""
    check(name, "adamw", what="step")


def check(name, optimizer, half=False, dropout=False, what="model"):
    if name in zoo.ZOO:
        networks.present(zoo.ZOO[name])
    task = curves.OWN[name]() if name in curves.OWN else curves.of_zoo(zoo.ZOO[name], dropout)

    def run(seed=None, **how):
        return curves.train(task, optimizer, half=half, seed=seed, **how)
    launched, before = [vitrify.counters["kernels_launched"]] if what == "model" else None, dict(vitrify.counters)
    with warnings.catch_warnings():
        warnings.simplefilter("error", vitrify.VitrifyWarning)
        ours = run(compiled=what, launched=launched)
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    if what == "model":
        assert did["compiled_calls"] == 2 * curves.STEPS and did["eager_calls"] == did["fallbacks"] == 0 and did["captures"] == 1, did
        assert all(b > a for a, b in zip(launched, launched[1:])), "a forward or a backward without a kernel of ours"
    else:
        assert did["compiled_calls"] == curves.STEPS - 1 and did["eager_calls"] == 1 and did["fallbacks"] == 0 and did["kernels_launched"] > 0, did
    eager = run()
    curves.Judge(eager, eager if task.draws else run(wide=True), run, factor=3 if half or task.draws else 2).check(ours)
    epoch = len(task.batches) if len(task.batches) < curves.STEPS else 4
    assert eager["losses"][-epoch:].mean() < eager["losses"][:epoch].mean(), "the network learns nothing"


@pytest.mark.no_kernels("nothing is compiled")
def test_there_are_enough():
    assert len(FORTY) >= 40 and len(HALF) >= 40
