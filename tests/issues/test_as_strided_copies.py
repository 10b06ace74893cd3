"""as_strided_scatter and as_strided_copy look at memory, as as_strided does: where what they are given is laid out otherwise when they run, they wrote to
and read other elements, or raised."""
import itertools

import pytest
import torch
import vitrify

MADE = {"argument": lambda x: x, "computed": lambda x: -x, "full": lambda x: torch.full_like(x, 2.0) + x * 0}
VIEWS = {
    "all": lambda x: x, "columns": lambda x: x[:, :2], "inner columns": lambda x: x[:, 1:3], "rows": lambda x: x[1:], "transpose": lambda x: x.t(), "every second": lambda x: x[:, ::2],
    "expand": lambda x: x[:1].expand(3, x.shape[1]), "nothing": lambda x: x[:, :0], "columns of a transpose": lambda x: x.t()[:2],
}
OPS = {
    "scatter": lambda y, *where: torch.as_strided_scatter(y, torch.ones(where[0]), *where) * 2, "copy": lambda y, *where: torch.as_strided_copy(y, *where) + 1,
    "view": lambda y, *where: torch.as_strided(y, *where) + 1,
}
PLACES = [(size, stride, offset) for size, stride, offset in itertools.product([(2,), (4,), (2, 2), (3, 2)], [(1,), (2,), (4, 1), (1, 4)], [None, 0, 1, 5]) if len(size) == len(stride)]


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("looks outside of what was given", some=True)
# From 2.15 on ATen says itself what is outside, as it does of memory.
@pytest.mark.eager("reaches outside its tensor", "invalid storage offset", "are out of bounds for storage of size", some=True)
@pytest.mark.compiled("some say nothing but where memory is")
@pytest.mark.filterwarnings("ignore:.*(reaches outside its tensor|invalid storage offset|are out of bounds for storage)")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("made", MADE)
def test_places_in_memory(made, view, op):
    x = torch.arange(12.0).reshape(3, 4)
    for where in PLACES:
        program = lambda x: OPS[op](VIEWS[view](MADE[made](x)), *where)  # noqa: E731, B023
        try:
            eager = program(x.clone())
        except RuntimeError:  # beyond the end of memory
            continue
        compiled = vitrify.compile(program)
        with torch.no_grad():
            for _ in range(2):
                ours = compiled(x.clone())
                assert ours.stride() == eager.stride() and torch.equal(ours, eager), where


NEGATIVE = {
    "as_strided": lambda x, *where: x.as_strided(*where) * 2, "as_strided_": lambda x, *where: x.clone().as_strided_(*where) * 2,
    "as_strided_copy": lambda x, *where: torch.as_strided_copy(x, *where) * 2, "as_strided_scatter": lambda x, *where: torch.as_strided_scatter(x, torch.ones(where[0]), *where) * 2,
}


@pytest.mark.no_kernels("eager raises in every call")
@pytest.mark.parametrize("where", [((3,), (-1,), 5), ((2, 2), (2, -1), 4)], ids=str)
@pytest.mark.parametrize("name", NEGATIVE)
def test_negative_strides(name, where):
    """Ours went backwards through the memory, as far as they led."""
    told = []
    for f in (NEGATIVE[name], vitrify.compile(NEGATIVE[name])):
        with pytest.raises(RuntimeError) as e:
            f(torch.arange(12.0), *where)
        told.append(str(e.value))
    assert told[0] == told[1] and "Negative strides" in told[0]


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("name", ["scatter", "as_strided", "channels last"])
def test_batches_of_gradients(name, dynamic):
    """Those of sizes that no plan has whole run through ATen, which has no rule for batches of aten::alias."""
    fns = {
        "scatter": lambda x: x.contiguous(memory_format=torch.channels_last).mul(2).as_strided_scatter(torch.ones(2), (2,), (1,)),
        "as_strided": lambda x: x.sin().as_strided((3, 4, 1, 1), (4, 1, 4, 4)) * 2,
        "channels last": lambda x: x.contiguous(memory_format=torch.channels_last).as_strided((3, 4), (4, 1)).exp(),
    }
    def told(f):
        r = []
        for n in (3, 5):
            x = torch.linspace(0, 1, 4 * n).view(n, 4, 1, 1).requires_grad_()
            out = f(x)
            r.append(torch.autograd.grad(out, x, torch.eye(3, out.numel()).view(3, *out.shape), is_grads_batched=True)[0])
        return r
    torch.testing.assert_close(told(vitrify.compile(fns[name], dynamic=dynamic)), told(fns[name]))
