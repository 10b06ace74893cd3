"""Products of more dims than two under sizes that change: one plan serves them, as matmul takes them apart in eager."""
import pytest
import torch
import torch.nn.functional as F
import vitrify

N = (5, 6, 7, 9, 12, 15, 20, 31, 33, 40)
CASES = {
    "3d by 2d": (lambda k, v: k @ v, lambda n: ((2, n, 16), (16, 8))),
    "3d by 1d": (lambda k, v: k @ v, lambda n: ((2, n, 16), (16,))),
    "3d by 3d": (lambda k, v: k @ v, lambda n: ((2, n, 16), (2, 16, n))),
    "4d by 4d": (lambda k, v: k @ v.mT, lambda n: ((2, 3, n, 16), (2, 3, n, 16))),
    "2d by 3d": (lambda k, v: k @ v, lambda n: ((5, n), (3, n, 4))),
    "1d by 3d": (lambda k, v: k @ v, lambda n: ((n,), (3, n, 4))),
    "broadcast": (lambda k, v: k @ v, lambda n: ((2, 1, n, 16), (3, 16, n))),
    "one batch": (lambda k, v: k @ v, lambda n: ((1, n, 16), (4, 16, 3))),
    "of one batch": (lambda k, v: k @ v, lambda n: ((n, 6, 4), (1, 4, 3))),
    "not dense": (lambda k, v: k.transpose(0, 1) @ v, lambda n: ((n, 2, 16), (16, 8))),
    "a slice": (lambda k, v: k[:, 1:, ::2] @ v, lambda n: ((2, n, 32), (16, 8))),
    "linear": (lambda k, v: F.linear(k, v), lambda n: ((2, n, 16), (8, 16))),
    "attention": (lambda k, v: (k @ v.mT).softmax(-1) @ v, lambda n: ((2, 2, 3, 16), (2, 2, n, 16))),
}


@pytest.mark.parametrize("needs", [(), (0,), (1,), (0, 1)], ids=["", "first", "second", "both"])
@pytest.mark.parametrize("name", CASES)
def test_one_plan(name, needs):
    f, sizes = CASES[name]
    compiled = vitrify.compile(lambda k, v: f(k.sin() if k.dim() == 1 else k, v) + 1)
    before = vitrify.counters["captures"]
    for n in N:
        made = [torch.randn(s, dtype=torch.float64) for s in sizes(n)]
        results = []
        for g in (compiled, lambda k, v: f(k.sin() if k.dim() == 1 else k, v) + 1):
            args = [t.clone().requires_grad_(i in needs) for i, t in enumerate(made)]
            out = g(*args)
            if needs:
                out.square().sum().backward()
            results.append((out, [t.grad for t in args]))
        torch.testing.assert_close(*results)
        for a, b in zip([results[0][0], *results[0][1]], [results[1][0], *results[1][1]]):
            assert (a is None) == (b is None) and (a is None or a.stride() == b.stride())
    assert vitrify.counters["captures"] - before == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    f = lambda k, v: (k @ v).exp()  # noqa: E731
    compiled = vitrify.compile(f)
    for n in (3, 4, 5):
        k, v = torch.randn(2, n, 8), torch.randn(8, 4)
        with torch.autocast("cpu", dtype):
            a, b = compiled(k, v), f(k, v)
        torch.testing.assert_close(a, b)
        assert a.dtype == b.dtype


def test_a_cache_that_grows():
    """One plan from the second size on, however many come."""
    def step(q, k, v, x):
        k, v = torch.cat([k, x], 1), torch.cat([v, x * 2], 1)
        return (q @ k.mT).softmax(-1) @ v, k, v
    compiled = vitrify.compile(step)
    before = vitrify.counters["captures"]
    with torch.no_grad():
        k = v = torch.randn(2, 2, 16)
        for _ in range(20):
            q, x = torch.randn(2, 1, 16), torch.randn(2, 1, 16)
            a, b = compiled(q, k, v, x), step(q, k, v, x)
            torch.testing.assert_close(a, b)
            k, v = a[1], a[2]
    assert vitrify.counters["captures"] - before <= 3


@pytest.mark.parametrize("sizes", [((2, 3, 4), (5, 6)), ((2, 3, 4), (3, 4, 5)), ((2, 3, 4), (5,))], ids=str)
def test_sizes_that_do_not_fit(sizes):
    f = lambda k, v: (k @ v) * 2  # noqa: E731
    compiled = vitrify.compile(f, dynamic=True)
    compiled(torch.randn(2, 3, 4), torch.randn(4, 5))
    args = [torch.randn(s) for s in sizes]
    with pytest.raises(RuntimeError) as ours:
        compiled(*args)
    with pytest.raises(RuntimeError) as eager:
        f(*args)
    assert str(ours.value) == str(eager.value)
