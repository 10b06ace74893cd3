"""The names that the text of a random program uses."""
from __future__ import annotations

import contextlib
import resource

import customs
import torch
import torch.nn.functional as F
import values
from compare import tensors_of
from torch import nn
from torch.utils.checkpoint import checkpoint


LINE = 2 << 30  # bytes that a line may ask for


@contextlib.contextmanager
def bounded():
    """What asks for more memory than a small machine has raises on every machine: a large one would make it, and compute for minutes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as sizes:
        now = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (min([now + LINE, *(limit for limit in before if limit != resource.RLIM_INFINITY)]), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def copies(grads):
    return [g if g is None else g.clone() for g in grads]


def heads(out):
    """The results that have gradients."""
    made = [t for _, t in tensors_of(out) if t.requires_grad and t.grad_fn is not None]
    if not made:
        raise NoGradient
    return made


class NoGradient(Exception):
    """A program of which nothing has a gradient."""


def tangents(made):
    """Exact in every dtype; no two neighbours alike, so that a transposed gradient shows."""
    return [torch.randint(1, 8, t.shape, generator=torch.Generator().manual_seed(40 + i)).to(t.dtype) * 0.25 for i, t in enumerate(made)]


def backward(out, **more):
    torch.autograd.backward(heads(out), tangents(heads(out)), **more)


def weighed(made):
    return sum((t * w).sum() for t, w in zip(made, tangents(made)))


def leaves(args):
    return [t for _, t in tensors_of(args) if t.requires_grad and t.is_leaf]


def parameters(net):
    return [] if net is None else [p for p in net.parameters() if p.requires_grad]


def steps(optimizer, f, net, args, count=3):
    optimizer = optimizer(leaves(args) + parameters(net))
    for _ in range(count):
        optimizer.zero_grad()
        weighed(heads(f(*args))).backward()
        optimizer.step()


def held(net, *ends):
    """The net, of which the parameters with these names are not trained."""
    for name, p in net.named_parameters():
        p.requires_grad_(not name.endswith(ends) if ends else True)
    return net


def names(wide=False, jolt=0):
    dtypes = values.WIDE if wide else values.DTYPES
    helpers = (heads, tangents, backward, weighed, leaves, parameters, steps, held, checkpoint)
    return {"__name__": "fuzzed", "torch": torch, "nn": nn, "F": F, "customs": customs, "values": values.Values(wide, jolt), "generator": torch.Generator().manual_seed(5),
            **{f.__name__: f for f in helpers}, **{name: dtypes[name] for name in values.NARROW}}
