"""as_strided with an offset counts from where the memory begins: a later argument may lie elsewhere in its memory."""
import pytest
import torch
import vitrify

PROGRAMS = {
    "another window": lambda x: x.as_strided((2,), (1,), 0) + x[1:3],
    "its own window, where it lies first": lambda x: x.as_strided((4,), (1,), 0) * 2,
    "returned as it is": lambda x: (x.as_strided((4,), (1,), 0), x + 1),
    "through a view": lambda x: x[1:].as_strided((2,), (1,), 1) * 3,
    "a copy": lambda x: torch.as_strided_copy(x, (2,), (1,), 0) + 1,
}


@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=list(PROGRAMS))
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.eager("aten::as_strided reaches outside its tensor", some=True)  # from the second place on: the memory before it is none of the argument's
def test_an_argument_lies_elsewhere_later(fn, grad):
    compiled, before = vitrify.compile(fn), dict(vitrify.counters)
    base = torch.arange(12.0, requires_grad=grad)
    for offset in (0, 3, 5, 0, 3):
        ours, eager = compiled(base[offset:offset + 4]), fn(base[offset:offset + 4])
        for a, b in zip(*([r if isinstance(r, tuple) else (r,) for r in (ours, eager)])):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.storage_offset() == b.storage_offset(), offset
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"]


@pytest.mark.slow
def test_a_long_chain_of_views():
    """Each took a frame of the stack: the process died."""
    def program(x):
        y = x[1:]
        for _ in range(40_000):
            y = y.t()
        return x * y.storage_offset(), y + 1
    compiled = vitrify.compile(program, fullgraph=True, dynamic=True, options={"compile_budget_s": 100})
    for n in (4, 5):
        x = torch.arange(float(n * n)).view(n, n)
        for ours, eager in zip(compiled(x), program(x)):
            assert torch.equal(ours, eager)
