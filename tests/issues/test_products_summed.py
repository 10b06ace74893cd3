"""A product that is summed is a number of its own in eager, and rounded: what overflows is infinite, and what cancels is 0. Ours was multiplied and added as one
(FMA) in reductions, moments, scatters and messages, which only the sums of a matrix product are."""
import pytest
import torch
import vitrify

T = torch.tensor
HUGE = T([[-2e38], [2e19]]).repeat(1, 40), T([[1.0], [2e19]]).repeat(1, 40)  # -2e38 + 4e38
FLOWS = T([[0.1] * 40, [-0.1] * 40])
FAR = T([[-2e37] * 8, [4e37] * 8, [0.0] * 8])
EDGES = T([[0, 1], [2, 2]])

PROGRAMS = {
    "columns": (lambda x, y: (x * y).sum(0), HUGE),
    "rows": (lambda x, y: (x * y).sum(1), tuple(t.t().contiguous() for t in HUGE)),
    "float64": (lambda x, y: (x * y).sum(0), (T([[-1.5e308], [1.4e154]], dtype=torch.float64).repeat(1, 40),
                                             T([[1.0], [1.4e154]], dtype=torch.float64).repeat(1, 40))),
    "mean of a constant's": (lambda x: (x * 10.0).mean(0), (FAR,)),
    "cancelled": (lambda x, y: 1 / (x * y).sum(0), (FLOWS, T(0.3))),
    "guarded": (lambda x, y: torch.where((x * y).sum(0) == 0, 0.0, 1.0), (FLOWS, T(0.3))),
    "all": (lambda x, y: 1 / (x * y).sum(), (FLOWS, T(0.3))),
    "moments of equals": (lambda x, y: (x * y).var(0, correction=0), (FLOWS.abs(), T(0.3))),
    "joined": (lambda x, y: torch.cat([x * y, x * y]).sum(0), HUGE),
    "index_add": (lambda x: torch.zeros(1, 8).index_add(0, T([0, 0, 0]), x * 10.0), (FAR,)),
    "scatter_add": (lambda x, i: torch.zeros(1, 8).scatter_add(0, i, x * 10.0), (FAR, torch.zeros(3, 8, dtype=torch.int64))),
    "index_put": (lambda x: torch.zeros(1, 8).index_put((T([0, 0, 0]),), x * 10.0, accumulate=True), (FAR,)),
    "messages": (lambda x, e, w: torch.zeros(3, 8).scatter_add(0, e[1][:, None].expand(-1, 8), x.index_select(0, e[0]) * w[:, None]).relu(),
                 (FAR, EDGES, T([10.0, 10.0]))),
    "odd messages": (lambda x, e, w: torch.zeros(3, 7).index_add(0, e[1], x[:, :7].index_select(0, e[0]) * w[:, None]).relu(), (FAR, EDGES, T([10.0, 10.0]))),
}


@pytest.mark.parametrize("options", [{}, {"fusion": "off"}, {"target": "x86-64-v3"}, {"backend": "interp"}], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name, options):
    f, given = PROGRAMS[name]
    compiled = vitrify.compile(f, options=options)
    for _ in range(2):
        torch.testing.assert_close(compiled(*given), f(*given), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("options", [{}, {"backend": "interp"}], ids=str)
def test_small_products_are_libraries(options):
    """Theirs add up with one rounding a step: of k * k - (1 + 2^-11) remains what rounding the product would have lost. (MKL's order is its own.)"""
    k = 1 + 2.0**-12
    x, y = T([[-(1 + 2.0**-11), k]]).repeat(4, 1), T([[1.0], [k]]).repeat(1, 40)
    compiled = vitrify.compile(lambda x, y: x @ y, options=options)
    assert torch.equal(compiled(x, y), torch.full((4, 40), 2.0**-24))
    assert (compiled(x, y) - x @ y).abs().max() <= 2.0**-23
