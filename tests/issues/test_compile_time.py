"""Programs whose index expressions, sizes or chains would grow without bound: they compile in a time that their size explains, with eager's results."""
import itertools
import re
import sys
import threading
import time
import warnings

import bounds
import compile_times
import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify

T = torch.arange


def data(*size):
    return T(1.0, 1 + torch.Size(size).numel()).reshape(size) / 7


def transposes(x):
    for _ in range(30):
        x = x.transpose(0, 1).reshape(x.shape)
    return x + 1


def windows(x, shift=(1, 2), n=12):
    for _ in range(n):
        x = torch.roll(x, shift, (1, 2))
        b, h, w, c = x.shape
        x = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 2, 2, c)
        x = x.view(b, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
    return x + 1


def scrambled_windows(x):
    for _ in range(12):
        x = torch.roll(torch.roll(x, 1, 1), 3, 2)
        b, h, w, c = x.shape
        x = x.view(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
    return x + 1


def chain(step, n):
    def f(x):
        for _ in range(n):
            x = step(x)
        return x + 1
    return f


def two_uses(x):
    for _ in range(60):
        x = x + x.flip(0) * 0.5
    return x


def two_views(x):
    for _ in range(25):
        a, b = x.t().reshape(x.shape), x.flip(1)
        x = torch.stack([a, b])[0] + torch.cat([b, a])[: x.shape[0]] * 0.25
    return x


def sizes_of_sizes(x):
    for _ in range(40):
        n = x.shape[0]
        x = torch.cat([x[: n // 2], x[n // 3:], x[: n // 5]])[: n]
    return x * 2


def many_parts(x):
    return torch.cat([x[i % 7: i % 7 + 1] * i for i in range(500)])


def cat_of_cats(x):
    parts = [x]
    for k in range(7):
        parts = [torch.cat([p, p.flip(0)]) for p in parts for _ in range(2)][:8]
    return torch.cat(parts)


CASES = {
    "transpose_reshape": (transposes, lambda: data(6, 10)),
    "roll_window": (windows, lambda: data(1, 8, 8, 4)),
    "roll_window_scrambled": (scrambled_windows, lambda: data(2, 8, 8, 4)),
    "unfold": (chain(lambda x: x.unfold(0, 5, 1).reshape(-1)[: x.numel()][::2].repeat(2)[: x.numel()], 12), lambda: data(64)),
    "as_strided": (chain(lambda x: (x + 1).as_strided((10, 6), (1, 10)).reshape(6, 10), 20), lambda: data(6, 10)),
    "flip_roll": (chain(lambda x: x.flip(0).roll(3).reshape(5, 12).t().reshape(-1), 25), lambda: data(60)),
    "cat_pad": (chain(lambda x: F.pad(torch.cat([x[3:], x[:3]]).reshape(6, 10).t().reshape(-1), (1, 1))[1:-1], 20), lambda: data(60)),
    "reflect": (chain(lambda x: F.pad(x, (2, 2), mode="reflect")[..., 1:-3], 25), lambda: data(2, 3, 40)),
    "repeat_interleave": (chain(lambda x: x.repeat_interleave(3).reshape(3, -1).t().reshape(-1)[::3], 20), lambda: data(60)),
    "pixel_shuffle": (chain(lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2).transpose(2, 3), 2), 15), lambda: data(1, 8, 4, 4)),
    "index": (chain(lambda x: x[T(x.numel() - 1, -1, -1)].reshape(6, 10).t().reshape(-1), 20), lambda: data(60)),
    "gather": (chain(lambda x: x.gather(0, (x.argsort() + 1) % 60), 12), lambda: data(60)),
    "two_uses": (two_uses, lambda: data(16) / 1e3),
    "two_views": (two_views, lambda: data(6, 10)),
    "where": (chain(lambda x: torch.where(x > 3, x.t().reshape(x.shape) * 0.5, torch.where(x < 1, x + 1, x.flip(0))), 25), lambda: data(6, 10)),
    "cumsum": (chain(lambda x: x.cumsum(0).reshape(6, 10).t().reshape(-1) / 60, 12), lambda: data(60)),
    "sizes": (sizes_of_sizes, lambda: data(97, 2)),
    "many_parts": (many_parts, lambda: data(8, 3)),
    "cat_of_cats": (cat_of_cats, lambda: data(3, 2)),
    "views": (chain(lambda x: x.unsqueeze(0).transpose(0, 1).squeeze(1).view(2, -1).view(-1), 500), lambda: data(64)),
    "pointwise": (chain(lambda x: (x * 0.5 + 1).sin(), 650), lambda: data(64)),
}


# Steps that add nothing to a loop's body, each reading the one before twice.
CASES["folds"] = (lambda x: chain(lambda m: m & m, 25)(x > 3)), lambda: data(64)
CASES["folds_masked"] = (lambda x: chain(lambda m: torch.where(m > 0, m, m).maximum(m), 25)(x)), lambda: data(64)


def element_writes(x):
    y = x.clone()
    for i in range(300):
        y[i % 7, i % 9] = y[(i + 1) % 7, (i + 2) % 9] * 0.5 + i
    return y


# The index of a reduction's operand is computed for each vector of a row: of 16 of them, in 4 s.
again = chain(lambda x: x.transpose(0, 1).reshape(x.shape), 24)
CASES["amax_of_columns"] = lambda x: again(x).amax(0), lambda: data(101, 257)
CASES["sum_of_rows"] = lambda x: again(x).sum(-1), lambda: data(640, 48)
CASES["sin"] = chain(torch.sin, 800), lambda: data(64)
CASES["element_writes"] = element_writes, lambda: data(7, 9)
CASES["accumulate"] = lambda x: torch.stack(list(itertools.accumulate(x.unbind(1), lambda a, b: a * 0.9 + b)), 1), lambda: data(7, 480)
CASES["accumulate_rows"] = CASES["accumulate"][0], lambda: data(64, 240)


def program(name):
    f, make = CASES[name]
    return f, make


WORK, PER_VALUE = 150_000, 500  # units (support/budget.h), the same on every machine
HANG, HANG_PER_VALUE = 2.5, 1e-2  # seconds, far above what is seen: a guard against work that nothing counts and that grows with each step


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", CASES)
def test_compiles_in_time_and_as_eager(name, dynamic):
    f, make = CASES[name]
    with torch.no_grad():
        vitrify.compile(lambda x: torch.roll(x, (1, 2), (0, 1)) + 1)(torch.ones(3, 4))  # what the first compile of a process loads
        want, x = f(make()), make()
    compiled, before = vitrify.compile(f, dynamic=dynamic), dict(vitrify.counters)
    with warnings.catch_warnings(), torch.no_grad(), compile_times.Recorder() as record:
        warnings.simplefilter("error")
        out = compiled(x)
    torch.testing.assert_close(out, want, **bounds.DEEP)
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    assert did["kernels_launched"] > 0 and did["eager_calls"] == 0
    assert 0 < record.work < max(WORK, record.values * PER_VALUE), record
    assert record.seconds < max(HANG, record.values * HANG_PER_VALUE), record


SPLITS = {"split": lambda x: torch.split(x, 1), "unbind": torch.unbind, "a chain": lambda x: [v.mul_(2) for v in torch.split(x, 1)],
          "of parts": lambda x: [v.t() for part in torch.split(x.t(), 20, 1) for v in torch.split(part, 1, 1)], "of a value": lambda x: (x * 2).split(1)}


@pytest.mark.parametrize("name", SPLITS)
def test_many_views_are_made_at_once(name):
    """Each result of a call that gives many is not made by a call of its own: that would take time by their square, in each call of the program."""
    f, n = SPLITS[name], 4000
    if name == "a chain":
        n = 300  # each write is seen through its memory
    elif name != "of a value":
        expects.no_kernels("views alone")
    with torch.no_grad():
        x, y = data(n, 1), data(n, 1)
        compiled, want = vitrify.compile(f), f(x.clone())
        compiled(x.clone())
        start = time.process_time()
        out = compiled(y)
        seconds = time.process_time() - start
        assert len(out) == len(want) == n and all(torch.equal(a, b) and a.stride() == b.stride() and a.storage_offset() == b.storage_offset() for a, b in zip(out, want))
        assert {v.untyped_storage().data_ptr() for v in out} == {out[0].untyped_storage().data_ptr()}
    assert seconds < 0.5, f"{seconds:.2f} s"


def test_views_of_one_call_have_one_node():
    def f(x):
        a, b, c = x.chunk(3)
        d, e = c.unbind()
        return a, b, d, e, (x * 2).sum()
    x = data(6, 2).requires_grad_()
    a, b, d, e, s = vitrify.compile(f)(x)
    assert a.grad_fn is b.grad_fn and d.grad_fn is e.grad_fn and d.grad_fn is not a.grad_fn
    want, (grad,) = f(x), torch.autograd.grad([a.sum(), (b * 2).sum(), d.sum(), e.sum() * 3, s], x)
    torch.testing.assert_close(grad, torch.autograd.grad([want[0].sum(), (want[1] * 2).sum(), want[2].sum(), want[3].sum() * 3, want[4]], x)[0])


def test_gathers_take_indices_of_32_bits(tmp_path):
    """Pointers do not change in the loop: they would all be made before it, more than there are registers."""
    f = vitrify.compile(lambda x: F.max_pool3d(x, 3, 2, 1), options={"dump": ["llvm"], "dump_dir": str(tmp_path)})
    x = data(2, 3, 9, 9, 70)
    with torch.no_grad():
        assert torch.equal(f(x), F.max_pool3d(x, 3, 2, 1))
    text = "".join(p.read_text() for p in tmp_path.iterdir())
    pointers = re.findall(r"getelementptr float, ptr %\S+, <\d+ x i\d+> (\S)", text)  # a constant beside a pointer that changes leaves the loop
    assert pointers and set(pointers) == {"%"}


class Sinkhorn(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        p = self.w
        for _ in range(20):
            p = p - p.logsumexp(1, keepdim=True)
            p = p - p.logsumexp(0, keepdim=True)
        return x @ p.exp()


class MixedKernel(Sinkhorn):
    def forward(self, x):
        w = self.w.view(4, 4, 4, 4)
        for _ in range(40):
            w = w * 0.5 + w.flip(0) * 0.4
        return F.conv2d(x.view(1, 4, 8, 8), w)


def numbers_of_numbers(x):
    a, b = x.sum() / 100, x.mean()
    for _ in range(40):
        a, b = a * 0.9 + b * 0.1, a * 0.2 + b.sqrt() * 0.8
    return x * a.item()


def masks_of_masks(x):
    def mask(i):
        for _ in range(40):
            i = i * 3 + i.roll(1)
        return i % 2 == 0
    i = x.long()
    return x[mask(i)].sum(0) + (x + 1)[mask(i)].sum(0)


def masks_of_an_argument(x, i):
    def mask(i):
        for _ in range(40):
            i = i * 3 + i.roll(1)
        return i % 2 == 0
    return x[mask(i)].sum(0) + (x + 1)[mask(i)].sum(0)


def numbers_of_the_graph(x):
    a, b = x.sum().item(), x.mean().item()
    for _ in range(40):
        a, b = max(a, b), min(a, b)
    return x.add(x, alpha=a)


SHARED = {"numbers of the graph": (numbers_of_the_graph, lambda: [data(16)]), "frozen weights": (Sinkhorn(), lambda: [data(4, 16)]), "frozen kernels": (MixedKernel(), lambda: [data(16, 16)]), "numbers": (numbers_of_numbers, lambda: [data(16)]),
          "masks": (masks_of_masks, lambda: [data(60)]), "masks of an argument": (masks_of_an_argument, lambda: [data(60), T(60)])}


@pytest.mark.parametrize("name", SHARED)
def test_what_is_used_twice_is_looked_at_once(name):
    """Steps that read a value twice: whoever follows them without a memory of where it has been takes time that doubles with each."""
    f, make = SHARED[name]
    with torch.no_grad():
        want, compiled = f(*make()), vitrify.compile(f)
        start = time.process_time()
        out = compiled(*make())
        assert time.process_time() - start < 2
        torch.testing.assert_close(out, want, **bounds.DEEP)


def test_nothing_runs_out_of_stack():
    def f(x):
        for _ in range(4000):
            x = x.t().unsqueeze(0).squeeze(0)
        return x + 1
    found = []

    def run():
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(torch.equal(vitrify.compile(f)(data(6, 10)), f(data(6, 10))))
    size = threading.stack_size(2 << 20)
    try:
        t = threading.Thread(target=run)
        t.start()
        t.join()
    finally:
        threading.stack_size(size)
    assert found == [True]


@pytest.mark.parametrize("option", [{}, {"fullgraph": True}])
def test_beyond_its_budget_a_program_runs_eagerly_and_says_why(option):
    f = chain(lambda x: (x.t() @ x.exp()).cumsum(0).reshape(x.shape), 60)
    x = data(6, 6) / 100
    compiled = vitrify.compile(f, options={"compile_budget_s": 1e-6}, **option)
    if option:
        expects.no_kernels("the program raises")
    else:
        expects.eager("compiling it takes more than it may (compile_budget_s is 1e-06)")
    with torch.no_grad(), warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        if option:
            with pytest.raises(vitrify.CaptureError, match="compile_budget_s"):
                compiled(x)
            return
        for _ in range(3):
            torch.testing.assert_close(compiled(x), f(x), equal_nan=True)
    assert len(log) == 1 and "compile_budget_s is 1e-06" in str(log[0].message)


def test_budget_is_counted_in_work():
    f = chain(lambda x: x.exp().cumsum(0).sin().cumsum(1), 20)
    vitrify.compile(f, options={"compile_budget_s": 60}, fullgraph=True)(data(6, 6))


def test_ctrl_c_ends_a_compile_and_the_next_call_compiles(monkeypatch):
    import _thread
    lost = []  # finalizers, where Python drops what is raised: a failure then names them
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    n = 3000
    f = chain(lambda x: (x * 1.0001 + 1).sin().cumsum(0), n)
    x = data(16)
    compiled = vitrify.compile(f)
    stop = threading.Event()

    def interrupt():  # once the capture is done
        while vitrify.counters["captures"] == before:
            time.sleep(1e-3)
            if stop.is_set():
                return
        _thread.interrupt_main()
    ended = 0
    for _ in range(6):
        before, built = vitrify.counters["captures"], vitrify.counters["kernels_built"]
        stop.clear()
        t = threading.Thread(target=interrupt)
        t.start()
        start = time.time()
        try:
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                compiled(x)
                t.join()  # a compile that was done first: the interrupt is still to come
        finally:
            stop.set()
            t.join()
            assert not lost, f"Python dropped the interrupt in {lost}"
        if vitrify.counters["kernels_built"] == built:
            ended += 1
        else:
            compiled = vitrify.compile(chain(lambda x: (x * 1.0001 + 1).sin().cumsum(0), n))
        if ended == 2:
            break
    assert ended == 2  # compiles that the interrupt ended before they were done
    ran = vitrify.counters["kernels_launched"]
    g = vitrify.compile(lambda x: x * 3)
    assert torch.equal(g(x), x * 3) and vitrify.counters["kernels_launched"] > ran
    assert "captures" in vitrify.counters and sys.exc_info()[0] is None and start


@pytest.mark.no_kernels("nothing is compiled")
def test_outliers_are_found_by_size():
    records = [(f"small {i}", 4 + i % 4, 0.01) for i in range(20)] + [(f"large {i}", 64 + i, 0.2) for i in range(20)]
    assert compile_times.outliers(records) == []
    assert compile_times.outliers(records + [("slow", 5, 0.3), ("fine", 70, 0.3)]) == [("slow", 5, 0.3, 0.01)]
    assert compile_times.outliers(records + [("known", 0, 9.0)]) == []  # nothing was compiled
    assert compile_times.outliers(records + [("huge", 128_000, 5.0)]) == []  # others of its size there are none: it may take what 1000 of the largest take
    assert [r[0] for r in compile_times.outliers(records + [("huge", 500, 50.0)])] == ["huge"]
    assert "| 4-7 | 20 | 10.0 ms | 10.0 ms |" in compile_times.table(records)


def llvm(f, x, path):
    """The LLVM code that `f` becomes: its lines, without those of the functions' declarations."""
    with torch.no_grad():
        out = vitrify.compile(f, options={"dump": ["llvm"], "dump_dir": str(path)})(x)
        torch.testing.assert_close(out, f(x), **bounds.DEEP)
    return [line for p in path.iterdir() for line in p.read_text().splitlines() if line.startswith("  ")]


@pytest.mark.parametrize("name", ["sin", "cos", "exp", "expm1", "log1p", "tanh", "erf", "sigmoid"])
def test_a_function_of_many_places_is_compiled_once(name, tmp_path):
    f = getattr(torch, name)
    assert len(llvm(chain(lambda x: f(x) * 0.5, 300), data(64), tmp_path)) < 300 * 6


def test_functions_of_few_places_are_written_out(tmp_path):
    assert not [line for line in llvm(chain(torch.tanh, 8), data(64), tmp_path) if " call " in line and "@llvm." not in line]


@pytest.mark.parametrize("n", [7, 64, 65, 4096])
def test_few_elements_and_long_bodies_have_one_loop(n, tmp_path):
    """A loop of whole vectors beside one for the rest is the same code twice."""
    code = llvm(chain(lambda x: x * 0.999 + 0.01, 90 if n == 4096 else 2), data(n), tmp_path)
    vectors = [line for line in code if re.search(r"call void @llvm.masked.store|^  store <", line)]
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        assert (len(vectors) == 1) == (n != 65), vectors
    else:
        assert n > 7 or not vectors


def test_values_that_nothing_reads_count_with_gradients_too():
    """Making them took its time; without them a small program would seem slow for its size."""
    counted = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad), compile_times.Recorder() as record:
            vitrify.compile(lambda x: (torch.split(x, 1)[-1], x.cos())[1])(data(300))
        counted.append(record.values)
        vitrify.reset()
    assert counted[0] >= 300 and counted[1] >= 300


def test_many_sizes_that_change():
    """Each has guards: work that looks through all of them for each value grows with the square of their number."""
    def work(n):
        arguments = [torch.rand(5, requires_grad=True) for _ in range(n)]
        with compile_times.Recorder() as record:
            results = vitrify.compile(lambda *a: tuple((t * a[(i + 1) % n]).sin() for i, t in enumerate(a)), dynamic=True)(*arguments)
            torch.autograd.grad(sum(r.sum() for r in results), arguments, create_graph=True)
        return record.work

    assert work(80) < 3 * work(40)
