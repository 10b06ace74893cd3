"""What a step of training takes in memory, beside eager: what tensors take at once, and what is kept for the backward."""
import copy

import bounds
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch import nn
from vitrify import measure, networks

pytestmark = pytest.mark.usefixtures("compiles")


class TensorMemory:
    """What tensors take, and what plans keep between them: by torch's profiler, of what is made and freed between enter and exit."""

    def __enter__(self):
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profile.__enter__()
        return self

    def reset_peak(self):
        with torch.profiler.record_function("reset_peak"):
            pass

    def __exit__(self, *error):
        self._profile.__exit__(*error)
        self.events, since = [], 0  # (when, bytes: negative when freed, under which nodes of autograd)
        pending = [(e, ()) for e in self._profile.profiler.kineto_results.experimental_event_tree()]
        while pending:
            event, under = pending.pop()
            pending += [(child, (*under, event.name)) for child in event.children]
            if event.name == "reset_peak":
                since = max(since, event.start_time_ns)
            elif event.tag == torch._C._profiler._EventType.Allocation:
                self.events.append((event.start_time_ns, event.typed[1].alloc_size, under))
        self.events.sort(key=lambda e: e[0])
        live = self.peak = 0
        for when, size, _ in self.events:
            live += size
            self.peak = max(self.peak, live if when >= since else 0)


def step_of(module, inputs, loss, compiled):
    module = copy.deepcopy(module).train()
    call = vitrify.compile(module, fullgraph=True) if compiled else module
    optimizer = torch.optim.AdamW(module.parameters())

    def step():
        optimizer.zero_grad()
        loss(call(*inputs), *inputs).backward()
        optimizer.step()
    return step


def test_a_step_takes_less_than_eagers():
    """What gelu is given is made again, not kept."""
    module, inputs = networks.build("norms", "s")

    def peak(compiled):
        with TensorMemory() as memory:
            step = step_of(module, inputs, lambda out, *inputs: networks.loss("norms", out, inputs), compiled)
            for _ in range(3):
                step()
            memory.reset_peak()
            did = measure.counted(step)
        assert not compiled or did["kernels_launched"] > 0
        return memory.peak
    eager, ours = peak(False), peak(True)
    assert ours < eager - 0.9 * inputs[0].nbytes, (ours, eager)


def test_activations_make_room_for_gradients():
    """Launches that share a parallel region let go of what they read for the last time before later ones have their results made."""
    module, inputs = networks.build("actor_critic", "s")
    step = step_of(module, inputs, lambda out, *inputs: networks.loss("actor_critic", out, inputs), True)
    for _ in range(3):
        step()
    with TensorMemory() as memory:
        did = measure.counted(step)
    assert did["kernels_launched"] > 0
    backward = [size for _, size, under in memory.events if "VitrifyBackward" in under[-1:] and abs(size) >= 4096]
    last_made = max(i for i, size in enumerate(backward) if size > 0)
    assert any(size < 0 for size in backward[:last_made]), backward


class Biased(nn.Module):
    """A bias that eager keeps no hold on stands between what is kept and what the derivative of gelu reads."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.bias = nn.Parameter(torch.randn(256))

    def forward(self, x, residual):
        return F.gelu(self.norm(x + residual) + self.bias)


def kept(call, inputs):
    sizes = []

    def pack(t):
        sizes.append(t.untyped_storage().nbytes())
        return t
    with torch.autograd.graph.saved_tensors_hooks(vitrify.mark_lossless(pack), lambda t: t):
        call(*inputs)
    return sum(n for n in sizes if n >= 512 * 256 * 4)


def test_rows_of_a_layer_norm_are_made_again():
    x, residual = torch.randn(512, 256), torch.randn(512, 256)
    module = Biased()
    compiled = vitrify.compile(module, fullgraph=True)
    compiled(x, residual).sum().backward()
    one = 512 * 256 * 4
    assert kept(module, (x, residual)) == 2 * one  # the sum, and what gelu is given
    assert kept(compiled, (x, residual)) == one


@pytest.mark.parametrize("shape, of", [((6, 5, 8), (8,)), ((6, 5, 8), (5, 8)), ((3, 8), (3, 8))])
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_rows_made_again_have_eagers_gradients(shape, of, affine):
    bias = torch.randn(of, requires_grad=True)
    norm = nn.LayerNorm(of, elementwise_affine=affine != "none", bias=affine == "both")
    x, y, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape)

    def gradients(compile, dtype):
        module, b = copy.deepcopy(norm).to(dtype), bias.detach().to(dtype).requires_grad_()
        leaf = x.detach().to(dtype).requires_grad_()

        def f(x, y, b):
            return F.gelu(module(torch.sin(x) + y) + b)
        out = (vitrify.compile(f, fullgraph=True) if compile else f)(leaf, y.to(dtype), b)
        (out * weight.to(dtype)).sum().backward()
        return [leaf.grad, b.grad, *(p.grad for p in module.parameters())]
    reference = gradients(False, torch.float64)
    for ours, eager, exact in zip(gradients(True, torch.float32), gradients(False, torch.float32), reference):
        assert measure.within(measure.error(ours, exact), measure.error(eager, exact)), (measure.error(ours, exact), measure.error(eager, exact))


def test_a_bias_that_changes_before_the_backward():
    """Eager's add keeps no hold on it: no error, and the gradient is that of the bias as it was."""
    x, residual = torch.randn(64, 256), torch.randn(64, 256)
    module = Biased()

    def gradients(call, module):
        out = call(x, residual)
        with torch.no_grad():
            module.bias.add_(1.0)
        out.sum().backward()
        return [p.grad for p in module.parameters()]
    ours, eager = copy.deepcopy(module), copy.deepcopy(module)
    compiled = vitrify.compile(ours, fullgraph=True)
    for a, b in zip(gradients(compiled, ours), gradients(eager, eager)):
        torch.testing.assert_close(a, b, **bounds.DEEP_CONVOLUTIONS)


def test_the_profiler_counts_large_results():
    """Blocks that are recycled past malloc, and memory that plans share."""
    x = torch.randn(3072, 4096)
    compiled = vitrify.compile(lambda x: torch.sin(x) + 1)
    compiled(x)
    with TensorMemory() as memory:
        y = compiled(x)
    assert memory.peak >= y.nbytes
    del y
