"""Programs that index, scatter and multiply, trained in double precision: first and second gradients beside eager's, with and without gradients of the second operand."""
import pytest
import torch
import vitrify

I2 = torch.tensor([[0, 1, 2], [2, 2, 0], [1, 0, 1]])
FNS = {
    "take": lambda x, w: x.take(I2),
    "put": lambda x, w: x.put(I2, w, accumulate=True),
    "idx_add": lambda x, w: x.index_add(0, torch.tensor([0, 0, 2]), w, alpha=2),
    "idx_copy": lambda x, w: x.index_copy(1, torch.tensor([0, 2]), w[:, :2]),
    "idx_fill": lambda x, w: x.index_fill(0, torch.tensor([1]), 0.5) * w,
    "idx_fill_t": lambda x, w: x.index_fill(0, torch.tensor([1]), w[0, 0]),
    "idx_reduce": lambda x, w: x.index_reduce(0, torch.tensor([0, 0, 2]), w, "amax"),
    "scat_red_sum": lambda x, w: x.scatter_reduce(0, I2, w, "sum"),
    "scat_red_amax": lambda x, w: x.scatter_reduce(0, I2, w, "amax", include_self=False),
    "scat_red_mean": lambda x, w: x.scatter_reduce(1, I2, w, "mean"),
    "masked_sel": lambda x, w: (x * w).masked_select(I2 > 0),
    "masked_scat": lambda x, w: x.masked_scatter(I2 > 0, w),
    "boolidx": lambda x, w: (x * w)[I2 > 1],
    "setbool": lambda x, w: (lambda h: (h.__setitem__(I2 > 0, 0.), h * w)[1])(x * 1),
    "setbool_t": lambda x, w: (lambda h: (h.__setitem__(I2 > 0, w.view(-1)[:6]), h)[1])(x * 1),
    "where1": lambda x, w: x[torch.where(I2 > 0)],
    "nonzero": lambda x, w: x.view(-1)[(I2.view(-1) > 0).nonzero()[:, 0]] * 2,
    "gather": lambda x, w: x.gather(1, I2) * w,
    "takealong": lambda x, w: torch.take_along_dim(x, w.argsort(1), 1),
    "topk": lambda x, w: (x * w).topk(2)[0],
    "sort": lambda x, w: (x * w).sort(stable=True, descending=True)[0],
    "bincount": lambda x, w: torch.bincount(I2.view(-1), weights=x.detach().view(-1)) * w[0],
    "diag_embed": lambda x, w: torch.diag_embed(x) @ w,
    "diagsc": lambda x, w: x.diagonal_scatter(w[0]),
    "selsc": lambda x, w: x.select_scatter(w[0], 1, 1),
    "slsc": lambda x, w: x.slice_scatter(w[:, :2], 1, 0, 2),
    "asstr_sc": lambda x, w: x.as_strided_scatter(w[:2, :2], (2, 2), (3, 1), 1),
    "roll": lambda x, w: x.roll((1, 2), (0, 1)) * w,
    "rot90": lambda x, w: x.rot90() @ w,
    "tril": lambda x, w: (x @ w).tril(-1),
    "block": lambda x, w: torch.block_diag(x, w),
    "kron": lambda x, w: torch.kron(x, w),
    "cart": lambda x, w: torch.cartesian_prod(x[0], w[0]),
    "meshgrid": lambda x, w: sum(torch.meshgrid(x[0], w[0], indexing="ij")),
    "tensordot": lambda x, w: torch.tensordot(x, w, 1),
    "einsum": lambda x, w: torch.einsum("ij,jk,ki->i", x, w, x),
    "cov": lambda x, w: torch.cov(x) @ w,
    "corr": lambda x, w: torch.corrcoef(x * w),
    "hist": lambda x, w: (x * w).cumsum(1).diff(dim=1),
    "trapz": lambda x, w: torch.trapezoid(x, w),
    "grad": lambda x, w: torch.gradient(x * w)[0],
    "cross": lambda x, w: torch.linalg.cross(x, w),
    "vander": lambda x, w: torch.linalg.vander(x[0]),
    "repint": lambda x, w: x.repeat_interleave(torch.tensor([1, 2, 0]), 0) ,
    "searchs": lambda x, w: x * torch.searchsorted(w[0].sort()[0].detach(), x.detach()),
    "bucket": lambda x, w: x * torch.bucketize(x.detach(), torch.tensor([0., 1])),
    "lerp": lambda x, w: torch.lerp(x, w, x),
    "addr": lambda x, w: torch.addr(x, w[0], x[0], beta=0.),
    "addmv0": lambda x, w: torch.addmv(x[0] * float("nan"), w, x[0], beta=0),
    "baddbmm0": lambda x, w: torch.baddbmm(x[None], x[None], w[None], beta=0, alpha=2),
    "chain": lambda x, w: torch.linalg.multi_dot([x, w, x]),
    "matpow": lambda x, w: torch.linalg.matrix_power(x @ w, 3),
}


def leaf(seed):
    return torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.double).requires_grad_(True)


def run(fn, which):
    x, w = leaf(which), leaf(9)
    w.requires_grad_(which != 1)
    out = fn(x, w)
    if not out.requires_grad:
        return [out]
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sin().sum()
    if which == 2:
        first = torch.autograd.grad(loss, (x, w), create_graph=True, allow_unused=True)
        loss = sum(g.pow(2).sum() for g in first if g is not None)
    if loss.requires_grad:
        loss.backward()
    return [out.detach(), x.grad, w.grad]


@pytest.mark.compiled("ATen computes all of some")
@pytest.mark.parametrize("name", FNS)
def test_gradients(name):
    compiled = vitrify.compile(FNS[name], fullgraph=True)
    for which in range(3):
        for ours, eager in zip(run(compiled, which), run(FNS[name], which)):
            assert (ours is None) == (eager is None)
            if eager is not None:
                torch.testing.assert_close(ours, eager, equal_nan=True)
