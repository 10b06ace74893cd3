"""A size that follows from content is taken for 2 where it is 0 or 1: a program that goes another way with that is captured with what it is."""
import expects
import pytest
import resource
import torch
import torch.nn.functional as F
import vitrify

GRU, CONV = torch.nn.GRU(4, 4), torch.nn.Conv1d(4, 4, 1)


def attention(v):
    q = v.view(1, -1, 2, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(-1, 4)


OPS = {
    "attention": attention, "gru": lambda v: GRU(v)[0], "conv": lambda v: CONV(v.t()[None])[0].t(), "median": lambda v: v - v.median(0)[0],
    "most": lambda v: v - v.amax(0), "kthvalue": lambda v: v - v.kthvalue(1, 0)[0], "interpolate": lambda v: F.interpolate(v.t()[None], scale_factor=2.0)[0].t(),
    "quantile": lambda v: v - v.quantile(0.5, 0), "norm": lambda v: F.batch_norm(v, None, None, training=True), "svd": lambda v: torch.linalg.svd(v, full_matrices=False)[2],
    "pool": lambda v: F.max_pool1d(v.t()[None], 1)[0].t(), "distances": lambda v: torch.cdist(v, v) @ v,
}


def rows(n):
    x = -torch.rand(8, 4) - 0.1
    x[:n] *= -1
    return x


@pytest.mark.parametrize("order", [(0, 3, 1, 0, 5), (1, 0, 4), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_a_branch(op, order):
    def f(x):
        v = x[x[:, 0] > 0]
        if v.shape[0]:
            v = OPS[op](v)
        return v[v[:, 0] > 0] * 2

    compiled = vitrify.compile(f)
    torch.manual_seed(0)
    with torch.no_grad():
        for n in order:
            x = rows(n)
            if op == "norm" and n == 1:
                continue  # eager raises
            torch.testing.assert_close(compiled(x), f(x))
    assert vitrify.counters["eager_calls"] == 0


def test_what_is_not_taken_is_raised():
    def f(x):
        v = x[x[:, 0] > 0]
        return (v.amax(0) if v.shape[0] != 7 else v) * 2

    compiled = vitrify.compile(f)
    expects.eager("a size that follows from content")
    with torch.no_grad():
        for n in (0, 3, 0):
            x = rows(n)
            if n:
                torch.testing.assert_close(compiled(x), f(x))
            else:
                for g in (f, compiled):
                    with pytest.raises(IndexError, match="amax"):
                        g(x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_no_rows_at_all(dynamic):
    def f(x, w):
        v = x[x[:, 0] > 0]
        return torch.einsum("nd,d->n", v, w) * 2

    compiled = vitrify.compile(f, dynamic=dynamic)
    with torch.no_grad():
        for n in (8, 0, 5):
            torch.testing.assert_close(compiled(torch.ones(n, 4), torch.ones(4)), f(torch.ones(n, 4), torch.ones(4)))


def test_a_size_that_nobody_knows_is_guessed_small():
    def f(x):
        v = x + torch.rand(x.shape[0], 1)
        v = v.repeat_interleave((v[:, 0] * 0 + 2).long(), 0)
        return torch.linalg.svdvals(v) * 2

    expects.eager("a size that follows from content")  # the op fixes its size by the guess
    results = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.no_grad():
        for g in (f, vitrify.compile(f)):
            torch.manual_seed(0)
            results.append(g(torch.ones(8, 4)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    torch.testing.assert_close(results[1], results[0])
