"""One plan for many sizes: values at each of them, and one capture for all."""
import importlib.util

import bounds
import pytest
import torch
import vitrify
from helpers import same
from torch import nn
from torch.nn import functional as F

TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2])
SIZES = (6, 3, 17, 33)


def check(f, make, sizes, delta, captures=1, bound=None, compiled=None):
    """Values at every size; the first one decides nothing but the hints."""
    g = compiled or vitrify.compile(f, dynamic=True)
    with torch.no_grad():
        for n in sizes:
            for _ in range(2):
                args = make(n)
                want = f(*args)
                got = g(*args)
                if bound is None:
                    same(got, want)
                else:
                    torch.testing.assert_close(got, want, **bound)
                    assert got.stride() == want.stride()
    assert delta.captures == captures and delta.eager_calls == 0


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 48), nn.ReLU(), nn.LayerNorm(48), nn.Linear(48, 5)).eval().requires_grad_(False)


def test_mlp(delta):
    check(mlp(), lambda n: (torch.randn(n, 20),), SIZES, delta)


def test_norm_softmax_chain(delta):
    w = torch.randn(40)
    check(lambda x: torch.softmax(F.layer_norm(x, (40,), w) * 2 + 1, -1).sum(-1), lambda n: (torch.randn(n, 40),), SIZES, delta)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_norm_softmax_over_a_dynamic_dim(delta, dim):
    """Rows kept in scratch memory must fit the size of this call, not of the first."""
    check(lambda x: torch.softmax(x - x.mean(dim, keepdim=True), dim) * x.std(dim, keepdim=True), lambda n: (torch.randn(3, n, 2 * n),), (4, 9, 301, 5), delta)


def test_scratch_grows(delta):
    check(lambda x: torch.log_softmax(torch.exp(x) * 0.5, -1) + x, lambda n: (torch.randn(4, n),), (3, 5000, 77), delta)


# Op, arguments for a size, plans for the four sizes: 2 where a size becomes 0 or 1 for the smallest, None where a size is fixed by what reads it.
OPS = {
    "size_as_number": (lambda x: torch.softmax(x * x.shape[0], -1) + x.shape[1] / 2 - x.shape[0], lambda n: (torch.randn(n, 4),), 1),
    "size_arithmetic": (lambda x: x.reshape(-1)[: x.shape[0] * 2] + x.numel() // 3, lambda n: (torch.randn(n, 4),), 1),
    "cat": (lambda x, y: torch.cat([x, y * 2, x], 0).relu(), lambda n: (torch.randn(n, 4), torch.randn(n + 2, 4)), 1),
    "cat_last": (lambda x, y: torch.cat([x, y], -1).sum(-1), lambda n: (torch.randn(5, n), torch.randn(5, n + 3)), 1),
    "split": (lambda x: [c * i for i, c in enumerate(x.split([x.shape[0] - 2, 2]))], lambda n: (torch.randn(n, 4),), 1),
    "chunk_columns": (lambda x: torch.sigmoid(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], lambda n: (torch.randn(n, 8),), 1),
    "transpose_view": (lambda x: (x.transpose(1, 2).reshape(x.shape[0], -1) + 1).view(-1), lambda n: (torch.randn(n, 3, 5),), 1),
    "matmul": (lambda x, y: torch.relu(x @ y.t()).sum(0), lambda n: (torch.randn(n, 8), torch.randn(2 * n, 8)), 1),
    "broadcast": (lambda x, y: (x[:, None] - y[None]).abs().amax(1), lambda n: (torch.randn(n), torch.randn(n + 1)), 1),
    "arange": (lambda x: x + torch.arange(x.shape[1]) * torch.ones(x.shape[0], 1), lambda n: (torch.randn(n, n + 1),), 1),
    "triu": (lambda x: torch.full((x.shape[0], x.shape[0]), float("-inf")).triu(1) + x, lambda n: (torch.randn(n, n),), 1),
    "index": (lambda x, i, j: x[i[:, None], j[None]] * 2, lambda n: (torch.randn(n, 7), torch.randint(0, n, (n + 1,)), torch.randint(0, 7, (4,))), 1),
    "embedding": (lambda i, w: F.embedding(i, w).mean(1), lambda n: (torch.randint(0, 11, (2, n)), torch.randn(11, 6)), 1),
    "pad": (lambda x: F.pad(x, (1, 2)) + 1, lambda n: (torch.randn(2, n),), 1),
    "flip_roll": (lambda x: x.flip(0) + x.roll(1, 0), lambda n: (torch.randn(n, 3),), 1),
    "cumsum": (lambda x: x.cumsum(0) + 1, lambda n: (torch.randn(n, 3),), 1),
    "mean_var": (lambda x: (x.mean(), x.var(0), x.argmax(0)), lambda n: (torch.randn(n, 3),), 1),
    "conv": (lambda x, w: F.relu(F.conv2d(x, w, padding=1)), lambda n: (torch.randn(n, 3, 8, 8), torch.randn(4, 3, 3, 3)), 1),
    "conv_image": (lambda x, w: F.max_pool2d(F.relu(F.conv2d(x, w, stride=2, padding=1)), 2), lambda n: (torch.randn(2, 3, n + 4, n + 5), torch.randn(4, 3, 3, 3)), None),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k), lambda n: (torch.randn(2, 4, n, 8), torch.randn(2, 4, n + 1, 8)), 1),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0), lambda n: (torch.randn(1, 2, n, n),), None),
    "tile": (lambda x: x.repeat(2, 3) + 1, lambda n: (torch.randn(n, 3),), 1),
    "batch_norm": (lambda x, m: F.batch_norm(x, m, m.abs() + 1) * 2, lambda n: (torch.randn(n, 6), torch.randn(6)), 1),
    "written": (lambda x: x.clone().mul_(2)[1:].add_(1), lambda n: (torch.randn(n, 6),), 1),
    # torch before 2.15 compares the ends of a slice that is written with the size, and 3 rows then are a case of their own
    "slice_written": (lambda x: _slice_written(x), lambda n: (torch.randn(n, 6),), 1 if TORCH >= (2, 15) else 2),
    "views_returned": (lambda x: (x[1:], x.t()), lambda n: (torch.randn(n, 6),), None),
    "branch": (lambda x: x * 2 if x.shape[0] > 10 else x + 1, lambda n: (torch.randn(n, 6),), 2),
    "equal_sizes": (lambda x, y: x + y if x.shape == y.shape else x.sum() + y, lambda n: (torch.randn(n, 6), torch.randn(n, 6)), 1),
    "stack_unbind": (lambda x: torch.stack([r * 2 for r in x.unbind(1)]), lambda n: (torch.randn(n, 3),), 1),
    "where": (lambda x: torch.where(torch.arange(x.shape[0])[:, None] < x.shape[0] // 2, x, -x), lambda n: (torch.randn(n, 3),), 1),
    "sort": (lambda x: x.sort(0).values * 2, lambda n: (torch.randn(n, 3),), 1),
    "bmm": (lambda x: torch.softmax(torch.bmm(x, x.transpose(1, 2)) / 3, -1).bmm(x), lambda n: (torch.randn(n, n + 1, 8),), 1),
    "matmul_of_batches": (lambda x: torch.softmax(x @ x.transpose(1, 2) / 3, -1) @ x, lambda n: (torch.randn(n, n + 1, 8),), None),  # torch's own matmul asks for numbers
    "linear_of_batches": (lambda x, w: F.linear(x, w).relu(), lambda n: (torch.randn(2, n, n + 1, 8), torch.randn(5, 8)), None),
    "channels_last": (lambda x: (x * 2).mean((2, 3)), lambda n: (torch.randn(n, 3, 4, 5).to(memory_format=torch.channels_last),), 1),
}


def _slice_written(x):
    y = x * 2
    y[1:-1, ::2] = 7
    y[0] += x[-1]
    return y


@pytest.mark.compiled("ATen computes it alone, or only views are made")
@pytest.mark.parametrize("name", OPS)
def test_ops(name, delta):
    f, make, captures = OPS[name]
    g = vitrify.compile(f, dynamic=True)
    for n in SIZES:
        for _ in range(2):
            args = make(n)
            same(g(*args), f(*args))
    if captures is not None:
        assert delta.captures == captures and delta.eager_calls == 0


def test_marked_dimension(delta):
    g = vitrify.compile(lambda x: torch.softmax(x * x.shape[0], -1))
    for n in (5, 2, 9, 31):
        x = torch.randn(n, 4)
        vitrify.mark_dynamic(x, 0)
        same(g(x), torch.softmax(x * n, -1))
    assert delta.captures == 1
    x = torch.randn(5, 6)  # the other dimension is not marked
    same(g(x), torch.softmax(x * 5, -1))
    assert delta.captures == 2


def test_bounds_of_a_mark_are_kept(delta):
    g = vitrify.compile(lambda x: x * 2)
    x = torch.randn(8, 4)
    vitrify.mark_dynamic(x, 0, min=4, max=16)
    same(g(x), x * 2)
    for n, captures in ((4, 1), (16, 1), (17, 2), (3, 2)):
        x = torch.randn(n, 4)
        same(g(x), x * 2)
        assert delta.captures == captures


def test_sizes_found_equal_by_chance_are_not_one(delta):
    g = vitrify.compile(lambda x, y: (x.sum(0), y * 2), dynamic=True)
    for n, m in ((4, 4), (4, 9), (9, 4)):
        x, y = torch.randn(n, 3), torch.randn(m, 3)
        same(g(x, y), (x.sum(0), y * 2))
    assert delta.captures == 1


def test_zero_and_one_stay_special(delta):
    g = vitrify.compile(lambda x, y: x + y, dynamic=True)
    for n in (4, 1, 0, 5):
        x, y = torch.randn(n, 3), torch.randn(1, 3)
        same(g(x, y), x + y)
    assert delta.captures == 3


@pytest.mark.compiled("only a view is made, or ATen computes all")
def test_same_tensor_twice(delta):
    check(lambda x, y: x @ y.t(), lambda n: (lambda t: (t, t))(torch.randn(n, 4)), SIZES, delta)


def test_threads_of_several_sizes(delta):
    """Long rows are cut between threads by the sizes of the call."""
    check(lambda x: torch.softmax(torch.tanh(x) * 3, -1) + x.sum(0), lambda n: (torch.randn(n, 300),), (3, 700, 65, 2), delta, bound=bounds.LONG_SUMS)


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="transformers is not installed")
@pytest.mark.network
@pytest.mark.filterwarnings("ignore")
def test_bert(delta):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    m = BertModel(BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=100)).eval().requires_grad_(False)
    g = vitrify.compile(m, dynamic=True)
    for b, s in ((2, 16), (3, 7), (5, 33), (2, 16), (4, 5)):
        ids, mask = torch.randint(0, 100, (b, s)), torch.ones(b, s, dtype=torch.long)
        mask[0, s // 2:] = 0
        with torch.no_grad():
            got, want = g(input_ids=ids, attention_mask=mask), m(input_ids=ids, attention_mask=mask)
        torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state, **bounds.DEEP)
        torch.testing.assert_close(got.pooler_output, want.pooler_output, **bounds.DEEP)
    assert delta.captures == 1 and delta.eager_calls == 0


@pytest.mark.skipif(not importlib.util.find_spec("torchvision"), reason="torchvision is not installed")
@pytest.mark.network
def test_resnet_batch(delta):
    from torchvision.models import resnet18

    torch.manual_seed(0)
    m = resnet18().eval().requires_grad_(False)
    g = vitrify.compile(m)
    for n in (2, 3, 5):
        x = torch.randn(n, 3, 64, 64)
        vitrify.mark_dynamic(x, 0)
        with torch.no_grad():
            torch.testing.assert_close(g(x), m(x), **bounds.DEEP_CONVOLUTIONS)
    assert delta.captures == 1 and delta.eager_calls == 0
