"""Results that kernels of ours compute lie in memory as those of eager's kernels, whatever layout the arguments have: ATen's Meta kernels do not always say so."""
import pytest
import torch
import torch.nn.functional as F
import vitrify
from beside import check


def permuted(x):
    return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))


def last(x):
    return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


LAYOUTS = {"dense": lambda x: x, "channels_last": last, "permuted": permuted, "sliced": lambda x: torch.cat([x, x], -1)[..., :x.shape[-1]], "expanded": lambda x: x[:1].expand(x.shape)}
IMAGE, VOLUME = (2, 4, 6, 6), (2, 4, 4, 6, 6)
OPS = {
    "reflect": (lambda x: F.pad(x, (1, 2, 1, 1), "reflect"), IMAGE), "replicate": (lambda x: F.pad(x, (1, 2, 1, 1), "replicate"), IMAGE), "constant": (lambda x: F.pad(x, (1, 2, 1, 1)), IMAGE),
    "circular": (lambda x: F.pad(x, (1, 2, 1, 1), "circular"), IMAGE), "reflect 3d": (lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), "reflect"), VOLUME), "replicate 3d": (lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), "replicate"), VOLUME),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), IMAGE), "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), IMAGE), "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), IMAGE),
    "glu": (lambda x: F.glu(x, 1), IMAGE), "glu of rows": (lambda x: F.glu(x, 3), IMAGE),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), VOLUME), "max_pool3d": (lambda x: F.max_pool3d(x, 2), VOLUME), "adaptive 3d": (lambda x: F.adaptive_avg_pool3d(x, 2), VOLUME),
    "nearest 3d": (lambda x: F.interpolate(x, scale_factor=2), VOLUME), "trilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), VOLUME), "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), IMAGE),
    "dropout": (lambda x: F.dropout2d(x, 0.5, True), IMAGE), "rms_norm": (lambda x: F.rms_norm(x, x.shape[-1:]), IMAGE), "logsumexp": (lambda x: x.logsumexp(1), IMAGE), "softmax": (lambda x: x.softmax(1), IMAGE),
    "aminmax": (lambda x: torch.aminmax(x, dim=1), IMAGE), "flip": (lambda x: x.flip(1), IMAGE), "roll": (lambda x: x.roll(1, 1), IMAGE), "tile": (lambda x: x.tile(1, 2, 1, 1), IMAGE), "square": (lambda x: x.square(), IMAGE),
    "index_fill": (lambda x: x.index_fill(1, torch.tensor([1]), 2.0), IMAGE), "fold": (lambda x: F.unfold(x, 2), IMAGE), "group_norm": (lambda x: F.group_norm(x, 2), IMAGE), "local_response_norm": (lambda x: F.local_response_norm(x, 2), IMAGE),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(op, layout):
    f, shape = OPS[op]

    def given():
        torch.manual_seed(1)
        return [LAYOUTS[layout](torch.randn(shape))]
    check(f, given, launches=op not in ("bicubic", "fold", "channel_shuffle"))  # those are calls


ANGLES = {"deg2rad": torch.deg2rad, "rad2deg": torch.rad2deg, "number": lambda x: x + 2.0, "sin": torch.sin, "self": lambda x: x + x}
VIEWS = {"transposed": lambda: torch.randn(8, 4, 1, 7).mT, "unsqueezed": lambda: torch.randn(3, 33, 7, 7).permute(3, 2, 1, 0).unsqueeze(0), "one between": lambda: torch.randn(3, 1, 5, 2).permute(3, 2, 1, 0), "far": lambda: torch.randn(4, 5, 6)[:, :1].permute(2, 1, 0)}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("op", ANGLES)
def test_strides_of_dims_of_one_element(op, view, dynamic):
    compiled = vitrify.compile(ANGLES[op], dynamic=dynamic)
    for _ in range(2):
        x = VIEWS[view]()
        assert compiled(x).stride() == ANGLES[op](x).stride()


def test_last_chunk_of_a_transposed_tensor_with_dynamic_sizes():
    """A stride that is a difference of sizes was taken to be negative, since nobody could show that it is not: such a result became contiguous."""
    def f(x):
        return x.chunk(2)[1] * 1
    compiled = vitrify.compile(f, dynamic=True)
    for rows, columns in ((4, 6), (5, 6), (33, 17)):
        x = torch.randn(columns, rows).t()
        ours, theirs = compiled(x), f(x)
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride() == (1, rows // 2)


def test_joined_operands_with_dynamic_sizes():
    """The extent of an operand had a symbol that the loops over it have not, and kernels did not get: the verifier refused them, as did the interpreter."""
    def f(x, w):
        return torch.cat([x, w], 1).square()
    compiled = vitrify.compile(f, options={"verify": True})
    for rows, columns in ((3, 7), (5, 9), (7, 2)):
        x, w = torch.randn(rows, columns), torch.randn(rows, 6)
        assert torch.equal(compiled(x, w), f(x, w))


ROWS = {"permuted": lambda: torch.randn(16, 7).t(), "swapped image": lambda: torch.randn(2, 3, 5, 4).mT, "one row": lambda: torch.randn(3, 1).t(), "column": lambda: torch.randn(1, 3).t(), "sliced": lambda: torch.randn(4, 6, 4)[..., ::2].transpose(0, 1),
        "one of many": lambda: torch.randn(4)[::4], "far": lambda: torch.randn(4, 1, 5)[::2].mT}
LIKE = {"deg2rad": torch.deg2rad, "rad2deg": torch.rad2deg, "hardtanh": F.hardtanh, "hardtanh of integers": lambda x: F.hardtanh(x.to(torch.int64)), "isfinite": torch.isfinite, "randint_like": lambda x: torch.randint_like(x, 5).to(torch.float16),
        "randint_like from": lambda x: torch.randint_like(x, 2, 5).to(torch.float16), "rsub of a number": lambda x: torch.rsub(x, 2.0), "rsub": lambda x: torch.rsub(x, torch.ones(x.shape)), "rsub from": lambda x: torch.rsub(torch.ones(x.shape), x)}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("op", LIKE)
def test_strides_of_what_eager_allocates_itself(op, rows, dynamic):
    compiled = vitrify.compile(LIKE[op], dynamic=dynamic)
    for _ in range(2):
        x = ROWS[rows]()
        ours, eager = compiled(x), LIKE[op](x)
        assert (ours.shape, ours.stride(), ours.dtype) == (eager.shape, eager.stride(), eager.dtype)


LARGE = {"reflect": lambda x: F.pad(x, (1, 2, 3, 1), "reflect"), "replicate": lambda x: F.pad(x, (1, 2, 3, -1), "replicate"), "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2), "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
         "roll": lambda x: x.roll((1, 2), (2, 3)), "roll by nothing": lambda x: x.roll((0, 140), (2, 3)), "roll and back": lambda x: x.roll((1, -1), (2, 2)), "reflect 3d": lambda x: F.pad(x.unflatten(2, (4, 32)), (1, 1, 1, 1, 1, 1), "reflect")}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("op", LARGE)
def test_strides_of_large_images(op, dynamic):
    """Kernels were asked for their layout up to a million elements; Meta's rules, which took their place beyond, forget channels-last memory."""
    compiled = vitrify.compile(LARGE[op], dynamic=dynamic)
    for channels in (64, 8):
        for layout in (last, lambda x: x):
            x = layout(torch.randn(1, channels, 128, 140))
            ours, eager = compiled(x), LARGE[op](x)
            assert torch.equal(ours, eager) and ours.stride() == eager.stride()


@pytest.mark.parametrize("f", [lambda x: F.binary_cross_entropy_with_logits(x, x.contiguous(), reduction="none"), lambda x: x.index_fill(1, torch.tensor([0]), 2.0), lambda x: x.square(), lambda x: F.l1_loss(x, x, reduction="none")])
def test_strides_of_one_row_of_many(f):
    x = torch.randn(1, 12, 10).transpose(0, 1)
    assert vitrify.compile(f)(x).stride() == f(x).stride()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(3, 2), (4, 2, 3)])
def test_rrelu(shape, training):
    """The functional form of the op keeps the layout of its argument, the op itself gives rows: gradients and moments of optimizers are laid out alike."""
    def f(x):
        return F.rrelu(x, training=training), F.rrelu(x * 2, training=training) + 0
    compiled = vitrify.compile(f)
    for _ in range(2):
        told = []
        for run in (f, compiled):
            torch.manual_seed(1)
            x = permuted(torch.randn(shape, generator=torch.Generator().manual_seed(2))).requires_grad_()
            out = run(x)
            told.append([*out, *torch.autograd.grad(sum(t.sum() for t in out), x)])
        for a, b in zip(*told):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()
    assert vitrify.counters["eager_calls"] == 0


@pytest.mark.parametrize("layout", ["dense", "permuted", "sliced"])
@pytest.mark.parametrize("rank", [2, 3])
def test_pooling_of_sequences_without_indices_in_inference_mode(rank, layout):
    """There it arrives as one op, whose own kernel gives contiguous memory whatever it is given."""
    def given():
        torch.manual_seed(1)
        return [LAYOUTS[layout](torch.randn((2, 4, 6)[3 - rank:]))]
    check(lambda x: (F.max_pool1d(x, 2) * 2, F.max_pool1d(x, 3, 1, 1)), given, around=torch.inference_mode)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drawing_with_one_probability(layout, dynamic):
    x = LAYOUTS[layout](torch.randn(IMAGE))
    f = lambda x: torch.bernoulli(x, 0.5) + 1  # noqa: E731
    with torch.no_grad():
        torch.manual_seed(1)
        want = f(x)
        torch.manual_seed(1)
        out = vitrify.compile(f, dynamic=dynamic)(x)
    assert torch.equal(out, want) and out.stride() == want.stride()


def test_strides_of_pooling_to_one_element():
    """max_pool1d gives new contiguous memory, also along dims of one element."""
    f, x = lambda x: torch.nn.functional.max_pool1d(x.transpose(1, 2), 2), torch.randn(4, 3, 8)
    with torch.inference_mode():
        assert vitrify.compile(f)(x).stride() == f(x).stride() == (8, 1, 1)


MADE = {
    "prelu": lambda x: F.prelu(x, torch.tensor([0.25])), "mask of dropout": lambda x: torch.native_dropout(x, 0.5, False),
    "alias_copy": lambda x: torch.ops.aten.alias_copy(x * 1), "detach_copy": lambda x: torch.ops.aten.detach_copy(x * 1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("op", MADE)
def test_strides_of_what_is_made_like_its_argument(op, view):
    def given():
        torch.manual_seed(1)
        return [VIEWS[view]()]
    check(MADE[op], given)
    check(MADE[op], lambda: [torch.arange(8.0).view(1, 1, 8)[None, ..., -1]])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("size", [(1, 2, 8, 1), (1, 3, 8, 1), (2, 2, 8, 1), (1, 2, 8, 3), (1, 4, 1, 1)], ids=str)
def test_of_what_a_roll_joins(size, dynamic):
    """Eager joins two parts, which may lie channels last where the whole does not, or only one of which does."""
    n, c, h, w = size
    with torch.no_grad():
        for by, dim in ((-1, 1), (1, 1), (1, 2), (-1, 2), (1, 3), (0, 1), ((1, -1), (1, 2))):
            f = lambda x, by=by, dim=dim: x.roll(by, dim) * 2  # noqa: E731
            for x in (torch.randn(n, h, c, w).transpose(1, 2), last(torch.randn(size)), torch.randn(size)):
                ours, theirs = vitrify.compile(f, dynamic=dynamic, fullgraph=True)(x), f(x)
                assert torch.equal(ours, theirs) and ours.stride() == theirs.stride(), (by, dim, x.stride())
