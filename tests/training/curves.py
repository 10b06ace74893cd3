"""Twenty steps of training, run compiled, eagerly, in fp64 and with roundings moved; and the rule that judges them."""
import contextlib
import copy
from dataclasses import dataclass
from typing import Callable

import networks
import torch
import vitrify
from compare import Jolts, steps
from vitrify import measure

STEPS = 20
HALF = torch.bfloat16
FEW, MOST = 2, 10  # runs with roundings moved


@dataclass
class Task:
    """What is trained: `loss(model, batch)` on the batches in turn."""
    module: torch.nn.Module
    batches: list
    loss: Callable
    whole: bool = False  # the loss function is what is compiled, not the module
    draws: bool = False  # random numbers, which an fp64 run would draw others of
    clip: float | None = None  # of the norm of all gradients
    rate: float | None = None


OPTIMIZERS = {"adamw": lambda p, rate: torch.optim.AdamW(p, rate or 1e-4), "sgd": lambda p, rate: torch.optim.SGD(p, rate or 1e-3, momentum=0.9)}


def moved(module, seed):
    """Each weight to a neighbour: what no float32 computation can know better."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            if p.is_floating_point():
                p.mul_(steps(p, seed * 1000 + i))
    return module


def jolted(seed):
    """For runs after the first ones: what every op gives moves by a rounding too, as in a sum of another order, which moved weights need not show."""
    return Jolts(100 * seed) if seed is not None and seed > FEW else contextlib.nullcontext()


def train(task, optimizer, *, half=False, compiled=None, wide=False, seed=None, launched=None):
    """The results of a run by name: its losses, the gradients of its first step, and statistics, parameters and optimizer state at its end.

    compiled: "model" (or the loss function, if that is what the task compiles) or "step". launched: takes the count of kernels after each forward and backward."""
    module, batches = copy.deepcopy(task.module), task.batches
    if wide:
        module, batches = module.double(), measure.to_double(batches)
    if seed is not None:
        moved(module, seed)
    model, loss_of, noise = module, task.loss, jolted(seed)
    if compiled == "model":
        model, loss_of = (model, vitrify.compile(loss_of)) if task.whole else (vitrify.compile(model), loss_of)
    torch.manual_seed(3)
    o = OPTIMIZERS[optimizer](module.parameters(), task.rate)

    def step(batch):
        o.zero_grad()
        with noise:
            with torch.autocast("cpu", HALF, enabled=half and not wide):
                loss = loss_of(model, batch)
            if launched is not None:
                launched.append(vitrify.counters["kernels_launched"])
            loss.backward()
            if launched is not None:
                launched.append(vitrify.counters["kernels_launched"])
        if task.clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), task.clip)
        o.step()
        return loss.detach()
    if compiled == "step":
        step = vitrify.compile(step)
    losses, found = [], {}
    for i in range(STEPS):
        losses.append(step(batches[i % len(batches)]))
        if i == 0:
            found.update({f"gradient {n}": p.grad.clone() for n, p in module.named_parameters() if p.grad is not None})
    found["losses"] = torch.stack(losses)
    found.update({f"statistic {n}": b.clone() for n, b in module.named_buffers()})
    for n, p in module.named_parameters():
        found[f"parameter {n}"] = p.detach()
        found.update({f"{k} {n}": v for k, v in o.state.get(p, {}).items()})
    found["random state"] = torch.get_rng_state()
    return found


class Judge:
    """Compares results with a reference: at most `factor` times as far from it as eager's, whose distance is that of runs that differ by roundings.

    Over each tensor; losses step by step, where what one is off by the later ones may be too. reference: of an fp64 run, or eager's own where there is none.
    run: gives the results with roundings moved, by a seed."""

    def __init__(self, theirs, reference, run, factor=2):
        self.theirs, self.reference, self.run, self.factor = theirs, reference, run, factor
        self.runs = [run(seed) for seed in range(1, FEW + 1)]
        self.sizes, largest = {}, {}
        for name, r in reference.items():
            if r is None or not r.is_floating_point() or not r.numel():
                continue
            size, kind = r.double().abs().max().item(), name.partition(" ")[0]  # gradient, parameter, statistic, exp_avg, ...
            largest[kind] = max(largest.get(kind, 0.0), size)
            # A gradient that is nothing but rounding (of a bias before a norm) is known as well as the sums that cancel in it.
            self.sizes[name] = size if any((t[name].double() - r).abs().max() < 0.5 * size for t in (theirs, *self.runs)) else largest
        self.sizes = {name: size if isinstance(size, float) else size[name.partition(" ")[0]] for name, size in self.sizes.items()}

    def distance(self, name, t):
        """As a tensor: of one element, or of one for each step."""
        r = self.reference[name].double()
        if r.numel() == 0:
            return torch.zeros(1)
        off = (t.double() - r).abs()
        return (off.cummax(0).values if name == "losses" else off.max().reshape(1)) / max(self.sizes[name], 1e-30)

    def known(self, name, runs):
        return torch.stack([self.distance(name, r[name]) for r in (self.theirs, *self.runs[:runs])]).amax(0)

    def near(self, name, off):
        """Where a rounding decides which way a ReLU or a maximum goes, few runs may all go one way: then more are asked."""
        for runs in range(FEW, MOST + 1):
            if runs > len(self.runs):
                self.runs.append(self.run(runs))
            if bool((off <= self.factor * self.known(name, runs) + 8 * torch.finfo(torch.float32).eps).all()):
                return True
        return False

    def check(self, mine):
        assert mine.keys() == self.theirs.keys()
        for name, e in self.theirs.items():
            a = mine[name]
            assert (a is None) == (e is None), name
            if a is None:
                continue
            assert a.dtype == e.dtype and a.shape == e.shape and a.stride() == e.stride(), name
            if not e.is_floating_point():
                assert torch.equal(a, e), name
                continue
            off = self.distance(name, a)
            assert not off.isnan().any(), name
            assert self.near(name, off), f"{name}: off by {figures(off)} of its largest, eager by {figures(self.known(name, MOST))}"


def figures(t):
    return " ".join(f"{v:.2e}" for v in t.tolist())


# ---- what is trained
def of_zoo(entry, dropout=False):
    module, args, kwargs = networks.build(entry)
    with torch.no_grad():
        module.eval()(*args, **kwargs)  # attributes that a first call writes
    module = module.train() if dropout else networks.without_dropout(module.train())
    return Task(module, [(args, kwargs)], lambda model, batch: networks.loss_of(model(*batch[0], **batch[1])), draws=dropout)


def unet():
    torch.manual_seed(0)
    images = networks.pictures(16)
    batches = [(images[i % 4::4], torch.randn(4, 3, 16, 16), torch.randint(0, 1000, (4,))) for i in range(STEPS)]
    return Task(networks.UNet(), batches, networks.noise_loss, rate=1e-3)


def unet_that_draws():
    torch.manual_seed(0)
    return Task(networks.UNet(), [networks.pictures(8)], networks.own_noise_loss, whole=True, draws=True, rate=1e-3)


def ppo(continuous=False, checks=True):
    torch.manual_seed(0)
    agent = networks.Agent(continuous=continuous, checks=checks)
    return Task(agent, networks.minibatches(networks.rollout(agent), epochs=5, size=32), networks.clipped_loss, whole=True, clip=0.5, rate=3e-3)


OWN = {"diffusion_unet": unet, "diffusion_unet_that_draws": unet_that_draws, "ppo": ppo, "ppo_unchecked": lambda: ppo(checks=False),
       "ppo_continuous": lambda: ppo(True)}
