"""Programs on CUDA tensors, before there are kernels of ours for them: whatever the engine does with them, results, state and errors are eager's.

Each program is called three times, with fresh arguments. What eager and the engine give is compared whole; none of these may be an internal error."""
import contextlib
import copy
import warnings

import bounds
import compare
import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify
from beside import same_call
from torch import nn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA tensors need a CUDA device")
ON = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def exact():
    """Products beside products, in full precision; what runs where is not what is asked here."""
    expects.judged("same_call compares each call; kernels for CUDA tensors are another matter")
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # the op database forbids to set these otherwise
        yield
    torch.backends.cuda.matmul.allow_tf32 = before


def run(fn, args):
    """As beside.run, with the state of CUDA's generator too."""
    torch.manual_seed(7)
    tensors = [t for _, t in compare.tensors_of(args)]
    version = lambda t: None if t.is_inference() else t._version  # noqa: E731
    before = [version(t) for t in tensors]
    out, error = None, None
    try:
        out = fn(*args)
    except Exception as e:
        error = e
    torch.cuda.synchronize()
    return out, error, [b is not None and version(t) - b for t, b in zip(tensors, before)], torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state()])


def beside(fn, make, grad=False, around=contextlib.nullcontext, **options):
    compiled = vitrify.compile(fn, **options)
    with warnings.catch_warnings(), torch.set_grad_enabled(grad), around():
        warnings.simplefilter("ignore")
        for _ in range(3):
            torch.manual_seed(1)
            a = make()
            torch.manual_seed(1)
            b = make()
            same_call(run(compiled, a), run(fn, b), a, b)


def images():
    return [torch.randn(2, 4, 6, 6, device=ON), torch.randn(8, 4, 3, 3, device=ON)]


def squares():
    return [torch.randn(5, 6, device=ON), torch.randn(5, 6, device=ON)]


def mixed():
    return [torch.randn(5, 6, device=ON), torch.randn(5, 6)]


def number():
    return [torch.randn(5, 6, device=ON), torch.tensor(2.5)]


PROGRAMS = {
    "elementwise": (lambda x, y: torch.relu(x * 2 + y).exp().sum(1), squares),
    "product": (lambda x, y: torch.softmax(x @ y.T, -1), squares),
    "linear": (lambda x, y: F.gelu(F.linear(x, y)), squares),
    "convolution": (lambda x, y: F.relu(F.conv2d(x, y, padding=1)), images),
    "channels last": (lambda x, y: F.max_pool2d(F.conv2d(x.to(memory_format=torch.channels_last), y), 2), images),
    "attention": (lambda x, y: F.scaled_dot_product_attention(x, x * 2, x + 1), lambda: [torch.randn(2, 4, 6, 8, device=ON), None]),
    "norm": (lambda x, y: F.layer_norm(x, (6,)) + F.rms_norm(y, (6,)), squares),
    "reductions": (lambda x, y: (x.sum(), x.amax(0), x.argmax(1), y.var(1), y.cumsum(0)), squares),
    "write": (lambda x, y: x.add_(1).mul_(y), squares),
    "write to a view": (lambda x, y: (x[1:].mul_(2), x.t().add_(1), x * y)[2], squares),
    "view": (lambda x, y: (x[1:], x.t(), x.unfold(1, 2, 2)), squares),
    "as_strided": (lambda x, y: (x * 2).as_strided((3, 3), (6, 1), 2) + 1, squares),
    "out": (lambda x, y: torch.add(x, y, out=torch.empty_like(x)) * 2, squares),
    "out, argument": (lambda x, y: torch.mul(x, 2, out=y), squares),
    "half": (lambda x, y: (x.half() @ y.half().T).float() + x.bfloat16().sum(), squares),
    "whole numbers": (lambda x, y: (x * 9).long() // 2 + (y * 9).int() % 3, squares),
    "complex": (lambda x, y: torch.view_as_real(torch.complex(x, y).conj() * 2).sum(), squares),
    "negative bit": (lambda x, y: torch.complex(x, y).conj().imag + 1, squares),
    "fft": (lambda x, y: torch.fft.rfft(x).imag + 1, squares),
    "made there": (lambda x, y: x + torch.arange(6, device=x.device) + torch.ones(6, device="cuda") + torch.zeros_like(y), squares),
    "made here": (lambda x, y: (torch.arange(6) + 1, torch.zeros(5, 6).add(1)), squares),
    "empty_strided there": (lambda x, y: torch.empty_strided((2, 3), (3, 1), device="cuda").zero_() + x.new_empty_strided((2, 3), (3, 1)).fill_(2), squares),
    "new_empty_strided of a CPU tensor": (lambda x, y: y.new_empty_strided((2, 3), (3, 1), device="cuda").fill_(2) + 1, mixed),
    "to the CPU": (lambda x, y: x.cpu() * 2 + y, mixed),
    "from the CPU": (lambda x, y: (x + y.cuda() * 2, (y * 3).to(x.device)), mixed),
    "both": (lambda x, y: (torch.relu(x) * 2, torch.relu(y) * 2), mixed),
    "copy_ across": (lambda x, y: (x.copy_(y), y.add_(1))[0] * 2, mixed),
    "two devices": (lambda x, y: x + y, mixed),
    "two devices, after a write": (lambda x, y: (y.add_(1), x.mul_(2), x @ y)[2], mixed),
    "number of the CPU": (lambda x, y: x * y + y, number),
    "number of the CPU, written": (lambda x, y: x.mul_(y).sum() * y, number),
    "index by the CPU": (lambda x, y: x[torch.tensor([0, 2])] * 2, squares),
    "mask": (lambda x, y: x[x > 0] * 2, squares),
    "nonzero": (lambda x, y: (x > 0).nonzero() + 1, squares),
    "item": (lambda x, y: x * y.sum().item(), squares),
    "decides": (lambda x, y: x + 1 if y.sum() > 0 else x - 1, squares),
    "index": (lambda x, y: x.index_add(0, torch.tensor([0, 0, 1], device=x.device), y[:3]), squares),
    "scatter": (lambda x, y: x.scatter_add(1, (y > 0).long(), y), squares),
    "index_put": (lambda x, y: torch.index_put(x, (torch.tensor([1, 2], device=x.device),), y[:2]), squares),
    "random": (lambda x, y: F.dropout(x, 0.5) + torch.rand_like(y) + torch.randn(5, 6, device=x.device), squares),
    "random on both": (lambda x, y: torch.rand(5, 6).sum() + torch.rand(5, 6, device="cuda").sum().cpu() + y.sum(), mixed),
    "bernoulli_": (lambda x, y: x.bernoulli_(0.3) + y.normal_(), squares),
    "sort": (lambda x, y: x.sort(1).values + y.topk(6, 1).values, squares),
    "embedding": (lambda x, y: F.embedding(torch.tensor([[0, 1], [2, 2]], device=x.device), x) * 2, squares),
    "foreach": (lambda x, y: torch._foreach_add(torch._foreach_mul([x, y], 2.0), 1.0), squares),
    "interpolate": (lambda x, y: F.interpolate(x, scale_factor=2, mode="bilinear"), images),
    "pad": (lambda x, y: F.pad(x.to(memory_format=torch.channels_last), (1, 1, 1, 1), mode="reflect"), images),
    "linalg": (lambda x, y: torch.linalg.solve(x @ x.T + 9 * torch.eye(5, device=x.device), y), squares),
    "svd": (lambda x, y: torch.linalg.svdvals(x) * 2, squares),
    "nothing": (lambda x, y: (x[:0] * 2, x[:0].sum(0)), squares),
    "pinned": (lambda x, y: y.pin_memory().is_pinned(), mixed),
    "is_cuda": (lambda x, y: x * 2 if x.is_cuda else x * 3, squares),
    "returns an argument": (lambda x, y: (x, y * 2, x), squares),
    "no such shape": (lambda x, y: x @ y, squares),
    "cat": (lambda x, y: torch.cat([x, y[:1]]) * 2, squares),
    "cat of two devices": (lambda x, y: torch.cat([x * 2, y]), mixed),
    "where with a number": (lambda x, y: torch.where(x > 0, x, y), number),
    "uniform of the CPU's generator": (lambda x, y: y.uniform_() + x.cpu(), mixed),
    "stream": (lambda x, y: (torch.cuda.current_stream().synchronize(), x * 2)[1], squares),
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name, grad):
    fn, make = PROGRAMS[name]
    beside(fn, make, grad=grad)


@pytest.mark.parametrize("name", ["elementwise", "write", "to the CPU", "random", "mask", "number of the CPU"])
def test_inference_mode(name):
    fn, make = PROGRAMS[name]
    beside(fn, make, around=torch.inference_mode)


@pytest.mark.parametrize("name", ["elementwise", "product", "both", "mask", "index"])
def test_sizes_that_change(name):
    fn, make = PROGRAMS[name]
    compiled = vitrify.compile(fn, dynamic=True)
    for rows in (5, 3, 1, 0, 7):
        torch.manual_seed(rows)
        args = [t.repeat(2, 1)[:rows] if t.shape[0] == 5 else t for t in make()]
        if name == "index" and rows < 3:
            continue
        same_call(run(compiled, args), run(fn, args), args, args)


def leaf(t):
    return t.detach().clone().requires_grad_()


LOSSES = {
    "product": lambda x, y: (torch.softmax(x @ y.T, -1) ** 2).sum(),
    "both": lambda x, y: (x * 2).sum().cpu() + (y.cpu() * 3).exp().sum(),
    "moved": lambda x, y: (x.cpu() * y.cpu()).cuda().tanh().sum(),
    "dropout": lambda x, y: (F.dropout(x, 0.5) * y).sum(),
    "norm": lambda x, y: (F.layer_norm(x, (6,)) * y).sum(),
    "index": lambda x, y: (x[torch.tensor([0, 0, 2], device=x.device)] * y[:3]).sum(),
    "checkpoint": lambda x, y: torch.utils.checkpoint.checkpoint(lambda a: torch.tanh(a @ y.T).sum(), x, use_reentrant=False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name):
    fn, compiled = LOSSES[name], vitrify.compile(LOSSES[name])
    for seed in range(3):
        torch.manual_seed(seed)
        given = [torch.randn(5, 6, device=ON), torch.randn(5, 6, device=ON)]
        ours, eager = [leaf(t) for t in given], [leaf(t) for t in given]
        results = []
        for f, args in ((compiled, ours), (fn, eager)):
            torch.manual_seed(5)
            loss = f(*args)
            loss.backward()
            results.append(loss.detach())
        torch.testing.assert_close(*results)
        for a, b in zip(ours, eager):
            torch.testing.assert_close(a.grad, b.grad)
            assert a.grad.stride() == b.grad.stride() and a.grad.device == b.grad.device


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.out(F.relu(self.norm(self.conv(x))).mean((2, 3)))


@pytest.mark.parametrize("training", [False, True])
def test_a_network_that_moves(training):
    """CPU, then the device, then the CPU with other weights: nothing is left of an earlier place."""
    torch.manual_seed(0)
    net = Net().train(training)
    plain, x = copy.deepcopy(net), torch.randn(2, 3, 8, 8)
    fast = vitrify.compile(net)
    with torch.no_grad():
        for device in ("cpu", "cuda", "cpu", "cuda"):
            for n in (net, plain):
                n.to(device)
                n.conv.weight.data.mul_(1.5)
            for _ in range(2):
                torch.testing.assert_close(fast(x.to(device)), plain(x.to(device)), **bounds.SUMS)
    for (name, a), (_, b) in zip(net.named_buffers(), plain.named_buffers()):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float16])
def test_training_steps(cast):
    torch.manual_seed(0)
    nets = [Net().to(ON)]
    nets.append(copy.deepcopy(nets[0]))
    calls = [vitrify.compile(nets[0]), nets[1]]
    optimizers = [torch.optim.AdamW(n.parameters(), lr=1e-3) for n in nets]
    scalers = [torch.amp.GradScaler("cuda", enabled=cast is torch.float16) for _ in nets]
    for step in range(4):
        x, y = torch.randn(4, 3, 8, 8, device=ON), torch.randint(4, (4,), device=ON)
        losses = []
        for call, optimizer, scaler in zip(calls, optimizers, scalers):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=cast, enabled=cast is not None):
                loss = F.cross_entropy(call(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach().float())
        torch.testing.assert_close(*losses, **(bounds.SUMS if cast is None else bounds.AUTOCAST))


def test_a_side_stream():
    """Work goes to the stream that is current at the call."""
    fn = lambda x: (x @ x.T).relu() + 1  # noqa: E731
    compiled, stream = vitrify.compile(fn), torch.cuda.Stream()
    x = torch.randn(512, 512, device=ON)
    compiled(x)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        y = x * 2
        out = compiled(y)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(out, fn(x * 2))


def test_a_graph_of_the_users():
    """A capture by torch.cuda.graph around a compiled call replays what eager would."""
    fn = lambda x: torch.softmax(x * 2, -1) + x.sum()  # noqa: E731
    compiled, x = vitrify.compile(fn), torch.randn(8, 8, device=ON)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            compiled(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(x)
    x.copy_(torch.randn(8, 8, device=ON))
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, fn(x))


def test_memory_stays_flat():
    fn = lambda x: F.gelu(x @ x.T).sum(0)  # noqa: E731
    compiled, x = vitrify.compile(fn), torch.randn(256, 256, device=ON)
    for _ in range(3):
        compiled(x)
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        compiled(x)
    assert torch.cuda.memory_allocated() == before


def test_out_of_memory():
    """Torch's own error, and the next call works."""
    fn = lambda x, n: x.new_zeros(n).add(1).sum() + x.sum()  # noqa: E731
    compiled, x = vitrify.compile(fn), torch.ones(4, device=ON)
    with pytest.raises(torch.OutOfMemoryError):
        compiled(x, 1 << 40)
    torch.testing.assert_close(compiled(x, 8), fn(x, 8))
