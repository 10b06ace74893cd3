"""What looks at memory and not at elements (as_strided, custom ops, draws, views in another dtype) sees it as eager has it, whatever strides passes chose for the values before it."""
import bounds
import pytest
import torch
import torch.nn.functional as F
import vitrify
from beside import calls_of, check
from torch import nn

torch.manual_seed(0)
CONV1, CONV3, DOWN = nn.Conv2d(8, 8, 1).eval(), nn.Conv2d(16, 16, 3, padding=1).eval(), nn.Conv2d(8, 8, 3, stride=2).eval()
BN = nn.BatchNorm2d(8).eval()
BN.running_mean.normal_()


def image():
    torch.manual_seed(1)
    return [torch.randn(2, 8, 6, 6)]


PROGRAMS = {
    "conv": lambda x: CONV1(x).as_strided((2, 8), (8, 1), 3) + 0,
    "conv, returned": lambda x: CONV1(x).sin().as_strided((2, 8), (8, 1), 3),
    "pad": lambda x: F.pad(CONV1(x), [2] * 4).as_strided((4, 5), (5, 2), 7) + 0,
    "pool": lambda x: F.max_pool2d(CONV1(x), 2).as_strided((3, 4), (4, 1)) * 2,
    "norm": lambda x: BN(CONV1(x)).as_strided((3, 4), (4, 1)) * 2,
    "sum": lambda x: (CONV1(x) + x).as_strided((3, 4), (4, 1)) * 2,
    "a view of a view": lambda x: CONV1(x)[:, 1:3].as_strided((3, 4), (4, 1), 5) * 2,
    "before the view it is made of": lambda x: CONV1(x)[1].as_strided((3, 4), (4, 1), 5) * 2,
    "of a transposed sum": lambda x: (CONV1(x).permute(0, 2, 3, 1) + 1).as_strided((3, 4), (4, 1), 5) * 2,
    "gaps of a slice": lambda x: (x * 2)[:, ::2].as_strided((3, 40), (50, 1), 5) * 2,
    "overlapping": lambda x: CONV1(x).as_strided((9, 9), (1, 1), 2).sum(0) + 1,
    "expanded": lambda x: CONV1(x).as_strided((9, 9), (0, 1), 2).sum(0) + 1,
    "two": lambda x: (CONV1(x).as_strided((9, 9), (2, 3), 2).as_strided((5,), (4,), 9) + 1),
    "then read again": lambda x: (lambda y: y.as_strided((9, 9), (2, 3), 2).sum() + y.relu())(CONV1(x)),
    "strided convolution": lambda x: DOWN(x).as_strided((3, 4), (4, 1)) * 2,
    "flattened": lambda x: CONV1(x).flatten(1).as_strided((3, 4), (4, 1), 2) * 2,
    "half the bits": lambda x: (CONV1(x) * 4).relu().round().view(torch.int16) + 1,
    "other bits": lambda x: (CONV1(x) * 4).relu().round().view(torch.int32) ^ 1,
    "pairs": lambda x: torch.view_as_complex(CONV1(x).relu().reshape(2, 8, 6, 3, 2)).real + 1,
    "rows of pairs": lambda x: torch.view_as_complex(CONV1(x).relu().unflatten(3, (3, 2))).imag + 1,
    "sorted": lambda x: torch.sort(CONV1(x).relu(), 1)[0],
    "scan": lambda x: CONV1(x).relu().cumsum(1),
    "unfold": lambda x: CONV1(x).unfold(2, 3, 1).contiguous() + 1,
    "draws": lambda x: torch.rand_like(CONV1(x).relu()) + 1,
    "draws in place": lambda x: CONV1(x).relu().normal_() + 1,
    "coins": lambda x: torch.bernoulli(CONV1(x).sigmoid()) + 1,
    "dropout": lambda x: F.dropout(CONV1(x).relu(), 0.5, True),
}


def write_through(x):
    y = CONV1(x).relu()
    y.as_strided((3, 4), (4, 1), 5).add_(1)
    return y * 2


def write_the_whole(x):
    y = CONV1(x)
    y.as_strided((576,), (1,)).mul_(2)
    return y + 1


def write_before(x):
    y = CONV1(x)
    v = y.as_strided((3, 4), (4, 1), 5)
    y[:, 1:4] = 7
    return v + 1, y


def write_into_the_argument(x):
    x[:, 2:3].as_strided((6, 6), (6, 1), 30).add_(1)
    return CONV1(x)


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_memory_is_eagers(program):
    check(program, image)


@pytest.mark.parametrize("program", [write_through, write_the_whole, write_before, write_into_the_argument], ids=lambda f: f.__name__)
def test_writes_through_views_of_memory(program):
    check(program, image)


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "sliced"])
def test_memory_of_arguments(layout):
    def f(x):
        return x.as_strided((3, 4), (4, 1), 2) + (x + 1).as_strided((3, 4), (4, 1), 2)

    def make():
        x, = image()
        return {"channels_last": lambda: [x.contiguous(memory_format=torch.channels_last)], "transposed": lambda: [x.transpose(1, 2)],
                "sliced": lambda: [x[:, ::2]]}[layout]()
    check(f, make)


@torch.library.custom_op("memory_of_views::strides", mutates_args=())
def strides(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(x.stride() + (x.storage_offset() * 0,))


@strides.register_fake
def _(x):
    return torch.empty(x.dim() + 1, dtype=torch.int64)


@torch.library.custom_op("memory_of_views::memory", mutates_args=())
def memory(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((12,), (1,)).clone()


@memory.register_fake
def _(x):
    return torch.empty(12, dtype=x.dtype)


CUSTOM = {
    "conv": lambda x: strides(CONV1(x)),
    "pointwise": lambda x: strides(CONV1(x).relu() * 2),
    "pool": lambda x: strides(F.max_pool2d(CONV1(x), 2)),
    "transposed": lambda x: strides((x + 1).transpose(1, 3)),
    "of a transposed sum": lambda x: strides(x.transpose(1, 3) + 1),
    "expanded": lambda x: strides((x[:, :1] + 1).expand(2, 8, 6, 6)),
    "sliced": lambda x: strides((x + 1)[:, ::2]),
    "a column": lambda x: strides((x * 2)[..., 1]),
    "product": lambda x: strides(x[0, 0] @ x[0, 1]),
    "elements of conv": lambda x: memory(CONV1(x).relu()),
    "elements of a norm": lambda x: memory(BN(CONV1(x))),
    "elements of a permuted sum": lambda x: memory((x + 1).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)),
}


@pytest.mark.parametrize("program", CUSTOM.values(), ids=CUSTOM)
def test_custom_ops_see_eagers_strides(program):
    check(lambda x: program(x) + 1, image)


def test_calls_keep_their_layout_where_nobody_looks():
    compiled = vitrify.compile(lambda x: CONV1(CONV1(x).relu()).relu() + 1)
    x, = image()
    with torch.no_grad():
        compiled(x)
    assert "aten::clone" not in calls_of(compiled)


class Trained(nn.Module):
    def __init__(self, look):
        super().__init__()
        self.a, self.b, self.look = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1), look

    def forward(self, x):
        y = self.b(self.a(x).relu()).relu()
        return self.look(y), y.mean()


LOOKS = {
    "as_strided": lambda y: y.as_strided((4, 16), (16, 1), 3).sin(),
    "pooled": lambda y: F.max_pool2d(y, 2).as_strided((4, 16), (16, 1), 3).sin(),
    "sorted": lambda y: torch.sort(y * 2, 1)[0].sin(),
    "strides": lambda y: strides(y * 2) + y.mean(),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_memory_in_training(look):
    torch.manual_seed(0)
    ours = Trained(look)
    theirs = Trained(look)
    theirs.load_state_dict(ours.state_dict())
    compiled, before = vitrify.compile(ours), dict(vitrify.counters)
    for _ in range(3):
        x = torch.randn(4, 8, 16, 16)
        results = []
        for m in (compiled, theirs):
            given = x.clone().requires_grad_()
            out, mean = m(given)
            (out.sum() + mean).backward()
            results.append([out, mean, given.grad, *(p.grad for p in m.parameters())])
        for a, b in zip(*results):
            assert a.stride() == b.stride() and a.dtype == b.dtype
            torch.testing.assert_close(a, b, **bounds.DEEP_CONVOLUTIONS)
    assert vitrify.counters["eager_calls"] == before["eager_calls"] and vitrify.counters["kernels_launched"] > before["kernels_launched"]


@torch.library.custom_op("vt_memory::stride_of", mutates_args=())
def stride_of(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(x.stride(), dtype=torch.float32) + x.flatten()[0]


@stride_of.register_fake
def _(x):
    return torch.empty(x.dim())


@pytest.mark.parametrize("part", [lambda t: t[::2], lambda t: t.view(4, 4)[:, 1:3], lambda t: t.view(4, 4).t()[1:]], ids=["every other", "columns", "a transposed part"])
@pytest.mark.parametrize("write", [lambda x: x.mul_(0.5), lambda x: x.data.mul_(0.5), lambda x: x[0].fill_(3)], ids=["mul_", "data", "a part"])
def test_gaps_of_an_input_that_was_written(part, write):
    """A custom op sees them."""
    def fn(x):
        write(x)
        return stride_of(x) * 2
    check(fn, lambda: [part(torch.arange(16.0))])


@pytest.mark.parametrize("change", [lambda v: v.t_(), lambda v: v.unsqueeze_(0), lambda v: v.transpose_(0, 1).squeeze_()], ids=["t_", "unsqueeze_", "two"])
def test_a_view_of_an_argument_that_changes_its_own_shape(change):
    """Such programs ran eagerly; without gradients the view is that of the new shape, made anew, and the version is counted."""
    def f(x):
        v, w = x[0], x[:, 1:]
        change(v)
        return v, w + 1, v * 2
    compiled = vitrify.compile(f)
    for _ in range(2):
        told = []
        for run in (f, compiled):
            x = torch.arange(24.0).view(2, 3, 4).clone()
            out = run(x)
            assert out[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and out[0]._base is x
            told.append([x._version, *[(t.stride(), t.tolist()) for t in out]])
        assert told[0] == told[1]
    assert vitrify.counters["eager_calls"] == 0
