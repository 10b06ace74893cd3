"""Operands of unlike types: eager's type of each result and gradient, or its error. Meta kernels and rules that look at one operand alone say otherwise."""
import sys
from pathlib import Path

import pytest
import torch
import vitrify

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import compare  # noqa: E402
import expects  # noqa: E402
import opinfo  # noqa: E402

OPS = {}
for _op in opinfo.database():
    OPS.setdefault(opinfo.name_of(_op), _op)
QUICK = """add sub mul div.no_rounding_mode div.floor_rounding remainder fmod pow atan2 copysign maximum fmin where lerp addcmul addcdiv clamp xlogy logaddexp hypot eq isclose logical_and
    masked_fill index_put index_add index_select gather scatter scatter_add cat stack matmul mm addmm bmm baddbmm dot nn.functional.linear nn.functional.embedding nn.functional.prelu
    nn.functional.l1_loss nn.functional.smooth_l1_loss nn.functional.binary_cross_entropy nn.functional.kl_div nn.functional.cosine_similarity nn.functional.rms_norm nn.functional.conv1d
    nn.functional.glu nn.functional.pairwise_distance slice_scatter select_scatter diagonal_scatter bucketize searchsorted nextafter outer cross cdist""".split()
NORMS_AND_LOSSES = """heaviside nn.functional.binary_cross_entropy_with_logits nn.functional.huber_loss nn.functional.mse_loss nn.functional.nll_loss nn.functional.cross_entropy
    nn.functional.layer_norm nn.functional.group_norm nn.functional.batch_norm nn.functional.instance_norm native_layer_norm native_batch_norm _softmax_backward_data""".split()


def with_types(value, at, dtype, count):
    """A copy in which the tensor of number `at` has another type; floats need gradients."""
    if isinstance(value, torch.Tensor):
        count.append(value)
        t = value.detach().to(dtype if len(count) == at + 1 else value.dtype, copy=True)
        return t.requires_grad_(t.is_floating_point())
    if isinstance(value, (tuple, list)):
        return type(value)(with_types(v, at, dtype, count) for v in value)
    return {k: with_types(v, at, dtype, count) for k, v in value.items()} if isinstance(value, dict) else value


def run(fn, packed, at, dtype, grad):
    args = with_types(packed, at, dtype, [])
    try:
        with torch.set_grad_enabled(grad):
            out = fn(*args)
            heads = [t for _, t in compare.tensors_of(out) if t.requires_grad and t.grad_fn is not None]
            if heads:
                torch.autograd.backward(heads, [torch.ones_like(t) for t in heads])
    except Exception as e:
        return f"{type(e).__name__}: {compare.first_line(e)}", ()
    return None, [*compare.flat(out), *((f"grad of {p}", t.grad) for p, t in compare.tensors_of(args) if t.is_leaf)]


def differences(op):
    fn, said = opinfo.function_of(op), []
    for sample in opinfo.samples_of(op, torch.float32, 2, opinfo.Result("")):
        packed = sample.input, sample.args, sample.kwargs
        given = [t for _, t in compare.tensors_of(packed)]
        for at, t in enumerate(given[:4] if len(given) > 1 else ()):
            for dtype in (torch.float64, torch.bfloat16, torch.int64) if t.is_floating_point() else (torch.int32,):
                for grad in (False, True):
                    (error, ours), (expected, eager) = run(vitrify.compile(fn), packed, at, dtype, grad), run(fn, packed, at, dtype, grad)
                    types = [[(p, (v.dtype, v.shape, v.stride()) if isinstance(v, torch.Tensor) else type(v)) for p, v in leaves] for leaves in (ours, eager)]
                    if error != expected or types[0] != types[1]:
                        said.append(f"{tuple(t.shape)} of number {at} as {dtype}, grad {grad}: {error or types[0]}, eager {expected or types[1]}")
    return said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({*QUICK, *NORMS_AND_LOSSES}))
def test_types(name):
    expects.eager("cannot store", "derivative for", some=True)  # eager raises too, at once or in the backward
    expects.compiled("ATen computes some of them alone, and others raise")
    expects.no_kernels("eager refuses some of them")
    said = differences(OPS[name])
    assert not said, said[:3]
    vitrify.reset()
