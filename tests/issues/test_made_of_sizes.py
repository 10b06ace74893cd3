"""What reads of a tensor only how it lies does not follow from it: nothing that is freed, written or kept of the tensor counts."""
import beside
import pytest
import torch
import vitrify

LIKE = {
    "full_like": lambda v: torch.full_like(v, 2.0), "ones_like": torch.ones_like, "zeros_like": lambda v: torch.zeros_like(v) + 3,
    "new_full": lambda v: v.new_full(v.shape, 0.5), "new_ones": lambda v: v.new_ones(4, 4), "new_zeros": lambda v: v.new_zeros(v.shape) - 1,
    "fill": lambda v: v.clone().fill_(2.5), "zero": lambda v: v.clone().zero_() + 1, "empty": lambda v: torch.empty_like(v).fill_(1.5),
    "new_empty": lambda v: v.new_empty(4, 4).fill_(1.5), "empty_strided": lambda v: v.new_empty_strided((4, 4), (1, 4)).fill_(1.5),
    "transposed": lambda v: torch.full_like(v.t(), 2.0), "in another type": lambda v: torch.ones_like(v, dtype=torch.float64).float(),
}
SHOWN = {"heaviside": lambda x: torch.heaviside(x, x), "exp": torch.exp, "product": lambda x: x @ x}


def steps(f, write):
    torch.manual_seed(0)
    x, w, u = (torch.randn(4, 4).requires_grad_() for _ in range(3))
    shown, *results = f(x, w, u)
    said = []
    for i, r in enumerate(results):
        if write and i == 1:
            with torch.no_grad():
                shown.mul_(2)
        try:
            said += torch.autograd.grad(r.sum(), [w, u], allow_unused=True)
        except RuntimeError as e:
            said.append(str(e).partition("\n")[0][:60])
    return said


@pytest.mark.sweep(3)
@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_backward_does_not_read_it(shown, like, dynamic):
    def f(x, w, u):
        v = SHOWN[shown](x)
        return v, x @ w, LIKE[like](v) @ u

    compiled = vitrify.compile(f, dynamic=dynamic)
    for write in (False, True):
        for a, b in zip(steps(compiled, write), steps(f, write), strict=True):
            assert type(a) is type(b) and not isinstance(b, str), (a, b)
            if b is not None:
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("like", LIKE)
def test_as_eager(like):
    f = LIKE[like]
    numbers = lambda *sizes: torch.arange(1.0, 1 + torch.Size(sizes).numel()).reshape(sizes)  # noqa: E731

    def twins(x):
        y = x * 2
        return f(y), f(y), f(y).mul_(3), y.stride()

    for make in (lambda: numbers(4, 4), lambda: numbers(4, 4).t(), lambda: numbers(4, 8)[:, ::2], lambda: numbers(4, 1).expand(4, 4)):
        beside.check(twins, lambda: [make()])


def test_of_sizes_that_content_gives():
    def f(x):
        found = x[x > 0]
        return torch.full_like(found, 2.0) * found, found.new_ones(found.shape), torch.zeros_like(found.nonzero())

    compiled = vitrify.compile(f)
    for seed in range(4):
        x = torch.randn(5 + seed, 3, generator=torch.Generator().manual_seed(seed))
        for a, b in zip(compiled(x), f(x), strict=True):
            assert torch.equal(a, b) and a.dtype is b.dtype and a.stride() == b.stride()


def test_filled_where_nothing_may_be_left_open():
    f = lambda x: (torch.empty_like(x * 2), (x * 2).new_empty(3), torch.empty_like(x.t()), torch.empty_like(x.long()))  # noqa: E731
    torch.use_deterministic_algorithms(True)
    try:
        for a, b in zip(vitrify.compile(f)(torch.ones(2, 3)), f(torch.ones(2, 3)), strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()) and a.stride() == b.stride()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("make", [lambda x: torch.full_like(x, -1.5), torch.zeros_like, torch.ones_like, lambda x: torch.full_like(x, 2), lambda x: x.new_full(x.shape, 3)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_strides_of_dims_of_one_element(make, dtype):
    """Those of the operand, which are not those that memory of such sizes has by itself."""
    f = lambda x: make(x.movedim(-1, -2))  # noqa: E731
    x = torch.zeros(130, 1, dtype=dtype)
    got, want = vitrify.compile(f)(x), f(x)
    assert got.stride() == want.stride() and torch.equal(got, want)
