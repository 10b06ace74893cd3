"""Modules in train mode: statistics, random streams, mixed precision, sizes that change, threads, modes that are refused."""
import copy
import threading
import warnings

import bounds
import gradients
import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
import vitrify
from beside import program
from gradients import check, leaf, leaves
from torch import nn


def close(ours, eager):
    """Of two modules: gradients and buffers."""
    gradients.same_grads([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()], lambda a, b, **k: torch.testing.assert_close(a, b, **bounds.DEEP))
    for (n, a), (_, b) in zip(ours.named_buffers(), eager.named_buffers()):
        torch.testing.assert_close(a, b, msg=lambda m: f"{n}: {m}")
        assert a._version == b._version, n


def step(f, m, *args, seed=0, loss=lambda y: (y.float() ** 2).mean()):
    torch.manual_seed(seed)
    m.zero_grad()
    value = loss(f(*args))
    value.backward()
    return value.detach(), torch.get_rng_state()


def beside_eager(build, make, steps=3, around=None, launches=True, **more):
    """`steps` steps of a module and of its copy, each with what `make(i)` gives."""
    torch.manual_seed(1)
    ours = build()
    eager = copy.deepcopy(ours)
    f, before = vitrify.compile(ours), dict(vitrify.counters)
    for i in range(steps):
        if around:
            with around():
                a, b = step(f, ours, *make(i), seed=i, **more), step(eager, eager, *make(i), seed=i, **more)
        else:
            a, b = step(f, ours, *make(i), seed=i, **more), step(eager, eager, *make(i), seed=i, **more)
        torch.testing.assert_close(a[0], b[0], **bounds.DEEP)
        assert torch.equal(a[1], b[1]), "the generator ends elsewhere"
        close(ours, eager)
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    assert did["compiled_calls"] == 2 * steps and did["eager_calls"] == did["fallbacks"] == 0, did
    assert did["kernels_launched"] > 0 or not launches
    return ours, eager


def x(*size):
    return lambda i: [torch.randn(size, generator=torch.Generator().manual_seed(100 + i))]


MODULES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), x(5, 8)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1)), x(2, 3, 8, 8)),
    "batch_norm": (lambda: nn.BatchNorm1d(6), x(5, 6)),
    "batch_norm_3d": (lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.BatchNorm3d(4)), x(2, 1, 5, 5, 5)),
    "batch_norm_plain": (lambda: nn.BatchNorm1d(6, affine=False), lambda i: [leaf(5, 6, seed=i)]),
    "batch_norm_no_stats": (lambda: nn.BatchNorm1d(6, track_running_stats=False), x(5, 6)),
    "instance_norm": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), x(2, 3, 5, 5)),
    "group_norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()), x(2, 3, 6, 6)),
    "layer_norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), x(5, 8)),
    "rms_norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), x(5, 8)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(10, 8, padding_idx=0), nn.Linear(8, 4)), lambda i: [torch.tensor([[0, 1, 1], [2, 9, 0]])]),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda i: x(2, 5, 8)(i) * 3),
    "transformer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), x(2, 5, 8)),
    "transformer_dropout": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True), x(2, 5, 8)),
    "dropout": (lambda: nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 4), nn.Dropout(0.5)), x(6, 8)),
    "dropout2d": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout2d(0.4)), x(2, 3, 6, 6)),
    "alpha_dropout": (lambda: nn.Sequential(nn.Linear(8, 32), nn.SELU(), nn.AlphaDropout(0.2)), x(6, 8)),
    "rrelu": (lambda: nn.Sequential(nn.Linear(8, 32), nn.RReLU()), x(6, 8)),
    "prelu": (lambda: nn.Sequential(nn.Linear(8, 32), nn.PReLU(32)), x(6, 8)),
    "gru_cell": (lambda: nn.GRUCell(4, 6), lambda i: [*x(2, 4)(i), *x(2, 6)(i + 50)]),
    "bilinear": (lambda: nn.Bilinear(4, 5, 3), lambda i: [*x(2, 4)(i), *x(2, 5)(i + 50)]),
    "conv_transpose": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 2, stride=2), nn.ELU(), nn.Upsample(scale_factor=2, mode="bilinear")), x(1, 3, 4, 4)),
    "pixel_shuffle": (lambda: nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.PixelShuffle(2), nn.AvgPool2d(2)), x(1, 2, 4, 4)),
}


def first(y):
    y = y[0] if isinstance(y, tuple) else y
    return (y ** 2).mean()


@pytest.mark.parametrize("name", MODULES)
def test_module(name):
    build, make = MODULES[name]
    beside_eager(build, make, loss=first)


BAG = [torch.tensor([0, 1, 1, 2, 9, 0]), torch.tensor([0, 2, 2])]
RECURRENT = {
    **{f"{kind.__name__} {args}": (lambda kind=kind, args=args: kind(4, 6, **args), x(2, 5, 4))
       for kind in (nn.LSTM, nn.GRU, nn.RNN) for args in (dict(batch_first=True), dict(), dict(num_layers=2, bidirectional=True), dict(num_layers=2, dropout=0.3), dict(bias=False))},
    "LSTM projected": (lambda: nn.LSTM(4, 6, proj_size=3), x(2, 5, 4)),
    "LSTM double": (lambda: nn.LSTM(4, 6).double(), lambda i: [x(2, 5, 4)(i)[0].double()]),
    "LSTM given": (lambda: nn.LSTM(4, 6), lambda i: [leaf(2, 5, 4, seed=i), (leaf(1, 5, 6, seed=i + 9), leaf(1, 5, 6, seed=i + 19))]),
}
BAGS = {
    **{f"{mode} {padding}": (lambda mode=mode, padding=padding: nn.EmbeddingBag(10, 8, mode=mode, padding_idx=padding), lambda i: BAG) for mode in ("sum", "mean", "max") for padding in (None, 1)},
    "rows": (lambda: nn.EmbeddingBag(10, 8, mode="sum"), lambda i: [torch.tensor([[0, 1, 1], [2, 9, 0]])]),
    "weighted": (lambda: nn.EmbeddingBag(10, 8, mode="sum"), lambda i: [*BAG, leaf(6, seed=i)]),
    "last offset": (lambda: nn.EmbeddingBag(10, 8, include_last_offset=True), lambda i: [BAG[0], torch.tensor([0, 2, 6])]),
    "double": (lambda: nn.EmbeddingBag(10, 8, mode="sum").double(), lambda i: BAG),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_module(name):
    beside_eager(*RECURRENT[name], loss=first, launches=False)


@pytest.mark.compiled("ATen computes all of it")
@pytest.mark.parametrize("name", BAGS)
def test_embedding_bag(name):
    beside_eager(*BAGS[name], loss=first, launches=False)
    assert vitrify.counters["captures"] == 1


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.e, self.l = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.l.weight = self.e.weight

        def forward(self, i):
            return self.l(self.e(i))
    beside_eager(Tied, lambda i: [torch.tensor([1, 2, 2])])


def test_frozen_parameters():
    def build():
        m = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        m[0].requires_grad_(False)
        return m
    ours, _ = beside_eager(build, x(3, 8))
    assert ours[0].weight.grad is None


def test_parameters_that_freeze_and_thaw():
    torch.manual_seed(1)
    ours = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    eager, f = copy.deepcopy(ours), vitrify.compile(ours)
    for i, frozen in enumerate((False, True, False, True)):
        for m in (ours, eager):
            m[0].requires_grad_(not frozen)
            for p in m.parameters():
                p.grad = None
        step(f, ours, *x(3, 8)(0)), step(eager, eager, *x(3, 8)(0))
        close(ours, eager)
    assert vitrify.counters["compiled_calls"] == 8 and vitrify.counters["recompiles"] == 1


def test_train_and_eval():
    torch.manual_seed(1)
    ours = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    eager, f = copy.deepcopy(ours), vitrify.compile(ours)
    for i, mode in enumerate((True, False, True, False, True)):
        ours.train(mode), eager.train(mode)
        a, b = step(f, ours, *x(6, 8)(i)), step(eager, eager, *x(6, 8)(i))
        torch.testing.assert_close(a, b)
        close(ours, eager)
        with torch.no_grad():
            torch.manual_seed(9)
            p = f(*x(6, 8)(i))
            torch.manual_seed(9)
            torch.testing.assert_close(p, eager(*x(6, 8)(i)))
    assert vitrify.counters["eager_calls"] == 0


@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, 0.01), lambda p: torch.optim.RMSprop(p, 0.01)], ids=["sgd", "adamw", "rmsprop"])
def test_the_loss_curve_is_eagers(optimizer):
    torch.manual_seed(1)
    ours = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
    eager, f = copy.deepcopy(ours), vitrify.compile(ours)
    curves = []
    for g, m in ((f, ours), (eager, eager)):
        torch.manual_seed(2)
        o, curve = optimizer(m.parameters()), []
        for i in range(20):
            loss = F.cross_entropy(g(*x(16, 8)(i % 4)), torch.arange(16) % 3)
            o.zero_grad()
            loss.backward()
            o.step()
            curve.append(loss.item())
        curves.append(curve)
    torch.testing.assert_close(*map(torch.tensor, curves), **bounds.DEEP)
    assert curves[0][-1] < curves[0][0] and vitrify.counters["compiled_calls"] == 40 and vitrify.counters["recompiles"] == 0


# ---- random streams

@pytest.mark.parametrize("text", ["return F.dropout(x, 0.3) * y", "return x * torch.rand(2, 3) + torch.randn(2, 3)", "return F.dropout(x, 0.5), F.dropout(y, 0.1)", "return x * torch.rand_like(y)",
                                  "return (x * 0.3).bernoulli() + x * torch.bernoulli(y * 0.3)", "return F.dropout(x, 0.0) * y", "return F.dropout(x, 1.0) * y", "return F.gumbel_softmax(x, hard=True) * y",
                                  "return torch.normal(x, y)", "return F.dropout(x.clone(), 0.5, inplace=True) * y", "return F.dropout1d(x[None], 0.5) * y",
                                  "return F.scaled_dot_product_attention(x[None], y[None], y[None], dropout_p=0.4)"])
def test_random_streams(text):
    check(program(text), leaves((2, 3), (2, 3)), native="none" if "normal(" in text else "forward")


def test_masks_are_kept_from_forward_to_backward(compiles):
    """Draws between forward and backward change nothing."""
    t = leaf(1000)
    out = vitrify.compile(lambda t: F.dropout(t * 2, 0.5))(t)
    torch.rand(100)
    out.sum().backward()
    assert torch.equal(t.grad != 0, out != 0) and set(t.grad.tolist()) == {0.0, 4.0}


# ---- mixed precision

def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def half(a, b, **_):
    """Of two bf16 computations: within their rounding of each other."""
    torch.testing.assert_close(a.float(), b.float(), **bounds.HALF)


@pytest.mark.parametrize("text", ["return F.linear(x, y)", "return F.linear(F.linear(x, y), y[:, :2])", "return torch.tanh(x @ y.t()) + (x @ y.t())", "return F.softmax(x @ y.t(), -1).sum()", "return x * y"])
def test_autocast_around(text):
    check(program(text), leaves((2, 3), (2, 3)), around=autocast, values=half, native="none")


def test_autocast_inside():
    def fn(a, b):
        with torch.autocast("cpu", torch.bfloat16):
            h = F.linear(a, b)
            with torch.autocast("cpu", enabled=False):
                k = F.linear(a, b)
        return h, k, h.float() * k
    check(fn, leaves((4, 8), (4, 8)), values=half, native="none")


def test_autocast_leaves_its_cache_alone():
    """Casts of a weight that eager cached, or will: neither reads the other's (capture.md A1)."""
    w = leaf(8, 8, seed=3)
    fn = vitrify.compile(lambda a: F.linear(a, w))
    for order in ("eager first", "ours first"):
        with autocast():
            a = leaf(4, 8)
            runs = [F.linear, fn] if order == "eager first" else [fn, F.linear]
            outs = [f(a, w) if f is F.linear else f(a) for f in runs]
            again = F.linear(a, w)
        assert all(o.dtype is torch.bfloat16 for o in (*outs, again))
        half(outs[0], outs[1])
        half(again, outs[0])
        with torch.no_grad():
            w.add_(1)
    assert vitrify.counters["compiled_calls"] == 2


def test_autocast_training_follows_the_weight():
    """A cast of a parameter belongs to one call: the next sees what the optimizer made of it."""
    torch.manual_seed(1)
    ours = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    eager, f = copy.deepcopy(ours), vitrify.compile(ours)
    curves = []
    for g, m in ((f, ours), (eager, eager)):
        o, curve = torch.optim.SGD(m.parameters(), 0.5), []
        for i in range(10):
            with autocast():
                loss = g(*x(6, 8)(0)).float().pow(2).mean()
            loss.backward()
            o.step()
            o.zero_grad()
            curve.append(loss.item())
        curves.append(curve)
    torch.testing.assert_close(*map(torch.tensor, curves), **bounds.HALF_CURVE)
    assert vitrify.counters["compiled_calls"] == 20 and vitrify.counters["eager_calls"] == 0


def test_grad_scaler():
    torch.manual_seed(1)
    ours = nn.Linear(8, 4)
    eager, f = copy.deepcopy(ours), vitrify.compile(ours)
    for g, m in ((f, ours), (eager, eager)):
        o, scaler = torch.optim.SGD(m.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for i in range(4):
            o.zero_grad()
            scaler.scale(g(*x(6, 8)(i)).pow(2).mean() * (float("inf") if i == 2 else 1)).backward()
            scaler.step(o)
            scaler.update()
        m.scale = scaler.get_scale()
    torch.testing.assert_close(ours.weight, eager.weight)
    assert ours.scale == eager.scale and vitrify.counters["compiled_calls"] == 8


@pytest.mark.parametrize("build", [lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)), lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())], ids=["mlp", "conv"])
def test_bfloat16_parameters(build):
    torch.manual_seed(1)
    ours = build().bfloat16()
    eager, f = copy.deepcopy(ours), vitrify.compile(ours)
    make = x(6, 8) if isinstance(ours[0], nn.Linear) else x(2, 3, 6, 6)
    for i in range(3):
        step(f, ours, make(i)[0].bfloat16()), step(eager, eager, make(i)[0].bfloat16())
        gradients.same_grads([p.grad for p in ours.parameters()], [p.grad for p in eager.parameters()], half)
    assert vitrify.counters["compiled_calls"] == 6


# ---- sizes

def test_one_plan_for_many_batch_sizes():
    torch.manual_seed(1)
    ours = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    eager, f = copy.deepcopy(ours), vitrify.compile(ours, dynamic=True)
    for n in (5, 3, 17, 64, 2, 5):
        a, b = step(f, ours, *x(n, 8)(n)), step(eager, eager, *x(n, 8)(n))
        torch.testing.assert_close(a[0], b[0])
        close(ours, eager)
    assert vitrify.counters["compiled_calls"] == 12 and vitrify.counters["captures"] == 1 and vitrify.counters["eager_calls"] == 0


@pytest.mark.parametrize("name", ["batch_norm", "layer_norm", "group_norm", "mlp", "embedding", "rms_norm", "dropout", "conv", "transformer"])
def test_sizes_that_change(name):
    build, make = MODULES[name]

    def sized(i):
        t = make(0)[0]
        if not t.is_floating_point():
            return [torch.randint(0, 9, (2 + 3 * i, *t.shape[1:]), generator=torch.Generator().manual_seed(i))]
        return [torch.randn(2 + 3 * i, *t.shape[1:], generator=torch.Generator().manual_seed(i))]
    beside_eager(build, sized, steps=5, loss=first)
    assert vitrify.counters["captures"] <= 2, "a plan per size"


# Results whose gradients do not meet have backwards of their own; all others share one.
APART = {"return (x * y).sum(), x.mean(0)": 2, "return x.view(-1).sin(), y.expand(2, *y.shape) * 2": 2, "return (x * x.shape[0]).exp(), x.sum() / y.numel()": 2,
         "return F.max_pool2d(x.view(1, 1, -1, 3), 2, 1), F.avg_pool2d(y.view(1, 1, -1, 3), 2, 1), F.adaptive_avg_pool2d(x.view(1, 1, -1, 3), 1)": 3}


@pytest.mark.parametrize("text", ["return (x * y).sum(), x.mean(0)", "return torch.cat([x, y]) * 2", "return F.cross_entropy(x @ y.t(), torch.arange(x.shape[0]))", "return x[1:] * y[:-1]", "return F.softmax(x, 0) @ y.t()",
                                  "return x.view(-1).sin(), y.expand(2, *y.shape) * 2", "return (x * x.shape[0]).exp(), x.sum() / y.numel()", "return x.mean() + y.mean(1).sum()", "return (x * x.shape[0]).sum() * y.numel()",
                                  "return F.scaled_dot_product_attention(x.view(1, -1, 1, 3), y.view(1, -1, 1, 3), y.view(1, -1, 1, 3))",
                                  "return F.max_pool2d(x.view(1, 1, -1, 3), 2, 1), F.avg_pool2d(y.view(1, 1, -1, 3), 2, 1), F.adaptive_avg_pool2d(x.view(1, 1, -1, 3), 1)"])
def test_functions_of_sizes_that_change(text):
    fn = program(text)
    compiled = vitrify.compile(fn, dynamic=True)
    for n in (4, 7, 3, 11):
        gradients.same(gradients.Run(compiled, leaves((n, 3), (n, 3))()), gradients.Run(fn, leaves((n, 3), (n, 3))()))
    backwards = APART.get(text, 1)
    assert vitrify.counters["compiled_calls"] == 4 * (1 + backwards) and vitrify.counters["captures"] == 1


# ---- threads

@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
def test_threads_train_models_of_their_own():
    torch.manual_seed(1)
    start = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def train(f, m, seed):
        o = torch.optim.SGD(m.parameters(), 0.1)
        for i in range(5):
            o.zero_grad()
            (f(*x(4, 8)(seed + i)) ** 2).mean().backward()
            o.step()
    models, problems = [copy.deepcopy(start) for _ in range(16)], []

    def work(k):
        try:
            train(vitrify.compile(models[k]), models[k], k)
        except BaseException as e:
            problems.append(e)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(16)]
    [t.start() for t in threads]
    [t.join(120) for t in threads]
    assert not problems and not any(t.is_alive() for t in threads), problems
    for k, m in enumerate(models):
        eager = copy.deepcopy(start)
        train(eager, eager, k)
        for a, b in zip(m.parameters(), eager.parameters()):
            torch.testing.assert_close(a, b)
    assert vitrify.counters["eager_calls"] == 0


def test_threads_share_one_model():
    torch.manual_seed(1)
    m = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    f, problems = vitrify.compile(m), []

    def work(k):
        try:
            for i in range(5):
                a = leaf(4, 8, seed=k)
                g, = torch.autograd.grad(f(a).sum(), a)
                b = leaf(4, 8, seed=k)
                e, = torch.autograd.grad(m(b).sum(), b)
                torch.testing.assert_close(g, e)
        except BaseException as e:
            problems.append(e)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    [t.start() for t in threads]
    [t.join(120) for t in threads]
    assert not problems, problems


def test_backward_on_another_thread(compiles):
    a = leaf(4)
    out = vitrify.compile(lambda a: a.sin() * a)(a)
    t = threading.Thread(target=lambda: out.sum().backward())
    t.start(), t.join(60)
    torch.testing.assert_close(a.grad, (a.cos() * a + a.sin()).detach())


# ---- modes that run eagerly

@pytest.mark.parametrize("nan", [True, False])
def test_detect_anomaly_runs_eagerly(nan):
    check(program("return (x - x).sqrt() * y * 0" if nan else "return x * y"), leaves((2, 3), (2, 3)), "anomaly", around=lambda: torch.autograd.detect_anomaly(check_nan=True), calls=2)


@pytest.mark.eager("a dual number of forward-mode differentiation")
def test_dual_numbers_run_eagerly():
    fn = lambda a: a.sin() * a  # noqa: E731
    compiled = vitrify.compile(fn)
    primal, tangent = leaf(4, grad=False), torch.ones(4)
    with fwAD.dual_level(), pytest.warns(vitrify.VitrifyWarning, match="dual|forward"):
        ours = fwAD.unpack_dual(compiled(fwAD.make_dual(primal, tangent)))
        eager = fwAD.unpack_dual(fn(fwAD.make_dual(primal, tangent)))
    torch.testing.assert_close(ours.tangent, eager.tangent)
    torch.testing.assert_close(compiled(primal), fn(primal))


@pytest.mark.eager("the call is inside a torch.func transform")
def test_functorch_transforms():
    fn = lambda a: (a.sin() * a).sum()  # noqa: E731
    compiled = vitrify.compile(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a = leaf(4, grad=False)
        torch.testing.assert_close(torch.func.grad(compiled)(a), torch.func.grad(fn)(a))
        torch.testing.assert_close(torch.func.vmap(compiled)(a.expand(3, 4)), torch.func.vmap(fn)(a.expand(3, 4)))
        torch.testing.assert_close(torch.func.jvp(compiled, (a,), (a,)), torch.func.jvp(fn, (a,), (a,)))


@pytest.mark.eager("argument 0 is a tensor subclass (Sub)")
def test_subclass_of_tensor_runs_eagerly():
    class Sub(torch.Tensor):
        pass
    a = leaf(3).detach().as_subclass(Sub).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = vitrify.compile(lambda t: t * 2)(a)
    assert type(out) is Sub
    out.sum().backward()
    assert a.grad is not None


def test_grad_mode_and_no_grad_mode_take_turns():
    m = nn.Linear(8, 4)
    f = vitrify.compile(m)
    for _ in range(3):
        a = torch.randn(3, 8)
        assert f(a).requires_grad
        with torch.no_grad():
            assert not f(a).requires_grad
        with torch.inference_mode():
            assert f(a).is_inference()
    assert vitrify.counters["captures"] == 3 and vitrify.counters["eager_calls"] == 0
