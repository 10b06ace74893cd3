"""A custom op that gives what no kernel can read, where its description promises a dense tensor: the process ended."""
import pytest
import torch
import vitrify

lib = torch.library.Library("results_of_custom_ops", "DEF")
GIVEN = {
    "coo": lambda x: (x * 2).to_sparse(), "csr": lambda x: (x.view(2, 2) * 2).to_sparse_csr(), "mkldnn": lambda x: x.to_mkldnn(),
    "zeros": lambda x: torch._efficientzerotensor(x.shape), "elsewhere": lambda x: torch.empty_like(x, device="meta"),
}
for name, kernel in GIVEN.items():
    lib.define(f"{name}(Tensor x) -> Tensor")
    lib.impl(name, kernel, "CPU")
    lib.impl(name, (lambda x: x.new_empty(2, 2)) if name == "csr" else torch.empty_like, "Meta")


def outcome(f, x):
    try:
        r = f(x)
        return str(r.to_dense() if r.layout != torch.strided else r)
    except (RuntimeError, NotImplementedError) as e:
        return type(e).__name__


@pytest.mark.parametrize("then", [lambda t: t * 2, lambda t: t.sum(), lambda t: t + 1, lambda t: torch.cat([t, t])], ids=["times", "sum", "plus", "cat"])
@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.eager("without a reason", "is no dense tensor in memory of its device", some=True)
@pytest.mark.no_kernels("eager serves what no kernel can read")
def test_it_is_eagers(name, then):
    op = getattr(torch.ops.results_of_custom_ops, name)
    program = lambda x: then(op(x))
    compiled = vitrify.compile(program)
    with torch.no_grad():
        for _ in range(3):
            assert outcome(compiled, torch.ones(4)) == outcome(program, torch.ones(4))
