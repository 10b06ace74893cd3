"""A training run three times from the same start: in double, eagerly, and with its step compiled."""
import copy

import torch
import vitrify
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(12, 24), nn.LayerNorm(24), nn.Linear(24, 7)

    def forward(self, x):
        return self.b(torch.nn.functional.gelu(self.n(self.a(x))))


def batch(i, dtype):
    g = torch.Generator().manual_seed(i)
    return torch.randn(9, 12, generator=g).to(dtype), torch.randint(0, 7, (9,), generator=g)


def tensors_of(model, optimizer):
    """Parameters and the optimizer's state, by name."""
    found = {f"param {n}": p.detach() for n, p in model.named_parameters()}
    for (n, p) in model.named_parameters():
        for k, v in optimizer.state.get(p, {}).items():
            found[f"state {n}.{k}"] = torch.as_tensor(v).detach() if isinstance(v, (int, float)) else v
    return {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}


def as_exact(ours, eager, exact, factor=2.0, slack=4e-7):
    """No further from the result in double than `factor` times eager is, counted over each tensor."""
    assert ours.keys() == eager.keys() == exact.keys()
    for k, want in exact.items():
        a, b = ours[k], eager[k]
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride(), k
        scale = want.abs().max().item() or 1.0
        mine, theirs = ((t.double() - want).abs().max().item() / scale for t in (a, b))
        assert mine <= factor * theirs + slack, (k, mine, theirs)


def trained(make_optimizer, *, steps, dtype, compiled, whole, model=None, clip=None, schedule=None, set_to_none=True, use=None):
    """(model, optimizer, losses): `whole` compiles forward, backward and update together, otherwise the update alone."""
    torch.manual_seed(0)
    model = (model or Net)().to(dtype)
    optimizer = make_optimizer(model.parameters())
    scheduler = schedule(optimizer) if schedule else None
    loss_of = nn.functional.cross_entropy

    def step(x, y):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = loss_of(model(x), y)
        loss.backward()
        if clip:
            clip(model.parameters())
        optimizer.step()
        return loss

    update = optimizer.step
    if compiled:
        step, update = (vitrify.compile(step), update) if whole else (step, vitrify.compile(update))
    losses = []
    for i in range(steps):
        x, y = batch(i, dtype)
        if whole:
            losses.append(step(x, y).detach().clone())
        else:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(model(x), y)
            loss.backward()
            if clip:
                clip(model.parameters())
            update()
            losses.append(loss.detach())
        if scheduler:
            scheduler.step()
        if use:
            use(i, model, optimizer)
    return model, optimizer, torch.stack(losses)


def compare(make_optimizer, *, steps=20, **how):
    """Runs all three, compares parameters, state and losses, and says what the compiled run counted."""
    plain = {k: v for k, v in how.items()}
    runs = {}
    for name, dtype, compiled in (("exact", torch.float64, False), ("eager", torch.float32, False), ("ours", torch.float32, True)):
        before = dict(vitrify.counters)
        model, optimizer, losses = trained(make_optimizer, steps=steps, dtype=dtype, compiled=compiled, **copy.copy(plain))
        runs[name] = {**tensors_of(model, optimizer), "losses": losses}
        counted = {k: v - before[k] for k, v in vitrify.counters.items()}
    as_exact(runs["ours"], runs["eager"], runs["exact"])
    return counted
