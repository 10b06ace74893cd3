"""A custom op that gives what no kernel can read, where its description promises a dense tensor: the process ended."""
import warnings

import expects
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


def test_a_program_that_stays_eager_says_why():
    """A kernel that lies otherwise each time: after some captures the program stays eager, which nothing told."""
    given = [0]

    @torch.library.custom_op("results_of_custom_ops::moves", mutates_args=())
    def moves(x: torch.Tensor) -> torch.Tensor:
        given[0] += 1
        return (x * 2.0).new_empty_strided(x.shape, (1, 8 + given[0])).copy_(x)

    moves.register_fake(torch.empty_like)
    expects.eager("results_of_custom_ops::moves: result 0 is f32")
    expects.no_kernels("no call is served by its plan")
    compiled, x = vitrify.compile(lambda x: torch.ops.results_of_custom_ops.moves(x) + 1), torch.randn(4, 4)
    with torch.no_grad(), warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        for _ in range(12):
            assert torch.equal(compiled(x), x + 1)
    told = [str(w.message) for w in log]
    assert len(told) == 1 and "runs eagerly from now on: results_of_custom_ops::moves: result 0" in told[0], told
