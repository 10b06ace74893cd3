"""Strides along dimensions of size 1 are those of eager's kernel, also where its Meta kernel records others (nonzero_static of one row)."""
import pytest
import torch
import vitrify


def test_strides_of_one_row():
    def f(x):
        return torch.nonzero_static(x, size=1), x + 1
    x = torch.ones(5, 5, 5)
    compiled = vitrify.compile(f)
    for _ in range(2):
        before = vitrify.counters["externs_called"]
        ours, theirs = compiled(x)[0], f(x)[0]
        assert vitrify.counters["externs_called"] == before + 1
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


@pytest.mark.compiled("rows of no coordinates have nothing to compute")
@pytest.mark.parametrize("shape", [(4,), (2, 3), (0,), ()])
def test_what_follows_inherits_them(shape):
    def f(x, y):
        rows = torch.nonzero_static(x, size=4)
        return y[rows] * 2, rows.t()
    x, y = torch.ones(shape), torch.arange(6.0)
    compiled = vitrify.compile(f)
    for _ in range(2):
        before = dict(vitrify.counters)
        for ours, theirs in zip(compiled(x, y.add(1)), f(x, y.add(1))):
            assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
        assert vitrify.counters["externs_called"] > before["externs_called"] and vitrify.counters["fallbacks"] == before["fallbacks"]
        assert shape == () or vitrify.counters["kernels_launched"] > before["kernels_launched"]  # rows of no coordinates: nothing to compute


@pytest.mark.parametrize("name, fn, make", [
    ("max_unpool2d of channels last", lambda x: torch.nn.functional.max_unpool2d(*torch.nn.functional.max_pool2d(x, 2, return_indices=True), 2), lambda: torch.randn(1, 4, 8, 8).contiguous(memory_format=torch.channels_last)),
], ids=lambda v: v if isinstance(v, str) else "")
def test_first_calls_know_the_strides_of_kernels(name, fn, make):
    """Small operands that are not row-major: the kernel is asked, on zeros."""
    f = lambda x: (fn(x), x + 1)  # noqa: E731
    x = make()
    compiled = vitrify.compile(f)
    for _ in range(2):
        torch.manual_seed(3)
        ours = compiled(x)
        state = torch.get_rng_state()
        torch.manual_seed(3)
        theirs = f(x)
        assert torch.equal(state, torch.get_rng_state())
        for a, b in zip(ours, theirs):
            assert a.stride() == b.stride()
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("op", [lambda x: x << 1, lambda x: x >> 1], ids=["left", "right"])
def test_what_only_meta_kernels_refuse(op):
    """Shifts of booleans."""
    f = lambda x: (op(x), x.float() + 1)  # noqa: E731
    compiled, x = vitrify.compile(f), torch.tensor([True, False, True])
    for a, b in zip(compiled(x), f(x)):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_attention_to_rows_with_gaps():
    """A copy of them is none where the call may read them as they are, which ATen's kernel cannot: it read other elements."""
    def f(x, mask):
        x = x.clone()
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    x = torch.randn(1, 2, 6, 16)[..., ::2]
    compiled = vitrify.compile(f)
    for mask in (None, torch.ones(6, 6, dtype=torch.bool).tril()):
        before = dict(vitrify.counters)
        torch.testing.assert_close(compiled(x, mask), f(x, mask))
        assert vitrify.counters["externs_called"] > before["externs_called"] and vitrify.counters["eager_calls"] == before["eager_calls"]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("steps", [(19, 19, 1), (3, 2, 1)], ids=str)
def test_attention_to_windows_of_a_signal(steps, dynamic):
    """The kernel lays its result out like the query, whose rows overlap where a copy of it is none: it wrote rows over each other."""
    def f(x):
        x = x.contiguous()
        return torch.nn.functional.scaled_dot_product_attention(x, x, x) * 2
    x = torch.randn(3 * 4 * 19 + 16).as_strided((3, 4, 5, 16), (*steps, 1))
    compiled = vitrify.compile(f, dynamic=dynamic)
    for given in (x, x.contiguous(), x):
        before = dict(vitrify.counters)
        torch.testing.assert_close(compiled(given), f(given))
        assert vitrify.counters["externs_called"] > before["externs_called"] and vitrify.counters["eager_calls"] == before["eager_calls"]


def test_calls_of_what_the_schedule_made_dense():
    """A call whose operand a kernel wrote in other strides than eager's gave strides of its own along dims of one element."""
    def f(x):
        v = x.to(torch.uint8).narrow(3, x.shape[3] - 1, 1)
        return torch.gcd(v, v), x + 1
    compiled = vitrify.compile(f)
    for perm in ((0, 1, 2, 3), (0, 3, 2, 1), (1, 0, 3, 2), (3, 2, 1, 0)):
        x = torch.arange(396).to(torch.int8).view([(3, 1, 4, 33)[p] for p in perm]).permute([perm.index(d) for d in range(4)])
        before = vitrify.counters["externs_called"]
        ours, theirs = compiled(x)[0], f(x)[0]
        assert vitrify.counters["externs_called"] == before + 1
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


@pytest.mark.no_kernels("the program raises", some=True)
@pytest.mark.parametrize("shape", [(2, 4, 4, 4), (2, 1, 4, 4), (1, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("before", [lambda x: x, lambda x: x * 2], ids=["argument", "computed"])
def test_what_kernels_refuse_as_it_lies(before, shape):
    """Meta kernels take a volume without a batch that lies as channels-last images do."""
    program = lambda x: torch.nn.functional.max_pool3d(before(x), 1) + 1  # noqa: E731
    compiled, x = vitrify.compile(program), torch.ones(shape).contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        seen = []
        for f in (program, compiled):
            try:
                seen.append((f(x).stride(), f(x).tolist()))
            except RuntimeError as e:
                seen.append(str(e).partition("\n")[0])
        assert seen[0] == seen[1]


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("shape, strides", [((7, 2, 8, 1), (16, 8, 1, 8)), ((7, 1, 8), (8, 8, 1)), ((1, 4, 6), (4, 1, 4))], ids=str)
@pytest.mark.parametrize("op", [torch.rand_like, torch.bernoulli], ids=["rand_like", "bernoulli"])
def test_what_was_written_keeps_them(op, shape, strides, dynamic):
    """Where sizes change, the strides of dims of one element do with them: an op of ATen's that repeats them was given others."""
    def f(x):
        x.lerp_(x * x, 0.5)
        return op(x), x.sum()
    compiled = vitrify.compile(f, dynamic=dynamic)
    for dtype in (torch.float32, torch.bfloat16):
        told = []
        for call in (f, compiled):
            torch.manual_seed(0)
            x = torch.empty_strided(shape, strides, dtype=dtype).fill_(0.5)
            told.append(call(x)[0])
        assert told[0].stride() == told[1].stride() and torch.equal(*told)
