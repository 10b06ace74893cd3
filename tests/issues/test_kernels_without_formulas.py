"""A custom op of which autograd has not been told: eager's autograd sees what its kernel calls, and differentiates that."""
import pytest
import torch
import vitrify

lib = torch.library.Library("without_formulas", "DEF")
lib.define("one(Tensor x) -> Tensor")
lib.impl("one", lambda x: x * 2, "CPU")
lib.impl("one", torch.empty_like, "Meta")
lib.define("two(Tensor x) -> (Tensor, Tensor)")
lib.impl("two", lambda x: (x * 2, x * 3), "CPU")
lib.impl("two", lambda x: (torch.empty_like(x), torch.empty_like(x)), "Meta")
ops = torch.ops.without_formulas
PROGRAMS = {
    "one": lambda x: ops.one(x) + 1,
    "one of another": lambda x: ops.one(ops.one(x)) + 1,
    "one result": lambda x: ops.two(x)[1] + 1,
    "both results": lambda x: torch.stack(ops.two(x)) + 1,
    "behind ours": lambda x: ops.one(x.sin()).cos(),
}


@pytest.mark.eager("on a tensor that needs gradients: autograd sees what its kernel calls")
@pytest.mark.no_kernels("eager serves it")
@pytest.mark.filterwarnings("ignore:.*autograd kernel was not registered")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_gradients_are_eagers(program):
    compiled = vitrify.compile(program)
    for _ in range(2):
        gradients = []
        for f in (program, compiled):
            x = torch.arange(1.0, 5).requires_grad_()
            f(x).sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_without_gradients_it_is_compiled(program):
    compiled, x = vitrify.compile(program, fullgraph=True), torch.arange(1.0, 5)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), program(x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x.requires_grad_()), program(x))
