"""What of the process decides what eager computes, changed between calls: each call is as eager in the same state, and plans are shared within one state only."""
import contextlib

import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch import nn


@contextlib.contextmanager
def setting(get, put, value):
    before = get()
    put(value)
    yield
    put(before)


def threads(n):
    return setting(torch.get_num_threads, torch.set_num_threads, n)


def deterministic():
    return setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


def flushed():
    return setting(lambda: False, torch.set_flush_denormal, True)


def double():
    return setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64)


STATES = {
    "one thread": lambda: threads(1), "two threads": lambda: threads(2), "no mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False), "deterministic": deterministic,
    "denormals flushed": flushed, "float64": double, "math attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "grad": torch.enable_grad, "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
torch.manual_seed(0)
CONV = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()).eval()
TINY = torch.full((64, 64), 1e-40)
PROGRAMS = {
    "convolutions": (lambda x: CONV(x) * 2, lambda: torch.randn(2, 8, 6, 6, dtype=torch.float32)),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x) + 1, lambda: torch.randn(2, 2, 64, 16)),
    "weights that are denormal": (lambda x: x + (TINY * 2).sum(0), lambda: torch.zeros(64)),
    "memory that nobody fills": (lambda x: torch.empty(3, 4).isnan().sum() * 0 + x, lambda: torch.randn(3, 4)),
    "a new tensor": (lambda x: x + torch.ones(4) / 3, lambda: torch.randn(3, 4)),
    "index_put": (lambda x: x.clone().index_put_((torch.tensor([1, 1, 0]),), torch.ones(3, 4), accumulate=True) + 1, lambda: torch.randn(3, 4)),
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_state_changes_between_calls(program, state):
    f, make = PROGRAMS[program]
    compiled, before = vitrify.compile(f), dict(vitrify.counters)
    for around in (contextlib.nullcontext, state, contextlib.nullcontext, state):
        with torch.no_grad(), around():
            torch.manual_seed(3)
            x = make()
            ours, theirs = compiled(x), f(x)
            assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
            rtol = 3e-2 if ours.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=0 if "denormal" in program else rtol)
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    assert did["compiled_calls"] == 4 and did["fallbacks"] == 0 and did["kernels_launched"] > 0


def test_plans_are_shared_within_a_state():
    """The same program with other weights runs the same plan, but not where the compile may have looked at something else."""
    def block():
        weight = torch.randn(16, 16)
        return lambda x: (x @ weight).sin() + 1
    x = torch.randn(4, 16)
    keep = []

    def shared(around=contextlib.nullcontext, **options):
        before = vitrify.counters["plans_shared"]
        with torch.no_grad(), around():
            keep.append(vitrify.compile(block(), **options))
            keep[-1](x)
        return vitrify.counters["plans_shared"] - before
    with threads(2):
        assert shared() == 0 and shared() == 1
        assert shared(lambda: threads(1)) == 0 and shared(lambda: threads(1)) == 1
        assert shared(lambda: torch.backends.mkldnn.flags(enabled=False)) == 0
        assert shared(options={"fusion": "off"}) == 0 and shared(options={"fusion": "off"}) == 1 and shared() == 1


def test_a_disabled_library_is_not_called():
    from beside import calls_of
    compiled = vitrify.compile(lambda x: CONV(x) * 2)
    with torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        compiled(torch.randn(2, 8, 6, 6))
    assert not any(name.startswith("mkldnn::_conv") for name in calls_of(compiled))


EMPTY = {"empty": lambda x: torch.empty(5), "like": lambda x: torch.empty_like(x), "new": lambda x: x.new_empty(4), "strided": lambda x: torch.empty_strided((2, 3), (1, 2)), "out": lambda x: torch.add(x, 1, out=torch.empty(x.shape)),
         "integers": lambda x: [torch.empty(4, dtype=d) for d in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)], "complex": lambda x: torch.view_as_real(torch.empty(3, dtype=torch.complex64)),
         "written": lambda x: torch.empty_like(x)[1:].copy_(x[1:]), "half": lambda x: torch.empty(3, dtype=torch.float16)}


@pytest.mark.parametrize("name", EMPTY)
def test_deterministic_mode_fills_empty_memory(name):
    def f(x):
        return EMPTY[name](x), x * 2
    x, compiled = torch.randn(4, 6), vitrify.compile(f)
    compiled(x)
    with deterministic():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), f(x), rtol=0, atol=0, equal_nan=True)


def in_order(fn, call, *states):
    """What `call` gives in each state, in turn: its error where it has one."""
    results = []
    for state in states:
        with state():
            try:
                results.append(call(fn).detach())
            except ValueError as e:
                results.append(str(e).partition("\n")[0])
    return results


def same(ours, eager):
    assert len(ours) == len(eager)
    for a, b in zip(ours, eager):
        if isinstance(b, str):
            assert a == b
        else:
            torch.testing.assert_close(a, b, equal_nan=True)


@contextlib.contextmanager
def unchecked():
    torch.distributions.Distribution.set_default_validate_args(False)
    yield
    torch.distributions.Distribution.set_default_validate_args(True)


@pytest.mark.eager("a value that the program reads is another")  # a check that fails
@pytest.mark.parametrize("first", [unchecked, contextlib.nullcontext])
def test_distributions_are_checked_as_set(first):
    """What was compiled while torch.distributions checked nothing went on without checks."""
    torch.distributions.Distribution.set_default_validate_args(True)

    def fn(scale):
        return torch.distributions.Normal(0., scale).log_prob(scale * 2).sum()

    good, bad = torch.tensor([1., 2.]), torch.tensor([1., -2.])
    compiled = vitrify.compile(fn, fullgraph=True)
    for scale in (good, bad, good):
        same(*(in_order(f, lambda f: f(scale), first, contextlib.nullcontext, unchecked, contextlib.nullcontext) for f in (compiled, fn)))
    assert vitrify.counters["captures"] == 2


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 5)), nn.Tanh())


CACHED = "torch.nn.utils.parametrize.cached() is on around the call"


@pytest.mark.eager(CACHED)
@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
def test_cached_parametrizations(before):
    """Placeholders of a capture were left in torch's cache, and the next call read them; a plan of before made the weight anew, which eager does not."""
    from torch.nn.utils import parametrize
    results = []
    for make in (vitrify.compile, lambda m: m):
        m = normed()
        f, x = make(m), torch.ones(2, 5)
        out = [f(x)] if before else []
        with parametrize.cached():
            out += [f(x), f(x * 2)]
            with torch.no_grad():
                m[0].parametrizations.weight.original0.mul_(2)
            out.append(f(x))
        out.append(f(x))
        out[-1].sum().backward()
        assert not parametrize._cache
        results.append(out + [p.grad for p in m.parameters()])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
    assert vitrify.counters["compiled_calls"]


def test_a_program_may_cache_parametrizations():
    from torch.nn.utils import parametrize
    m = normed()

    def fn(x):
        with parametrize.cached():
            return m(x) + m(x * 2)

    compiled = vitrify.compile(fn, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(torch.ones(2, 5)), fn(torch.ones(2, 5)))
    assert not parametrize._cache


MHA = torch.backends.mha
ASKED = {
    "fast paths": (MHA.get_fastpath_enabled, lambda: setting(MHA.get_fastpath_enabled, MHA.set_fastpath_enabled, False)),
    "precision": (lambda: torch.get_float32_matmul_precision() == "highest", lambda: setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium")),
    "warnings": (lambda: not torch.is_warn_always_enabled(), lambda: setting(torch.is_warn_always_enabled, torch.set_warn_always, True)),
    "deterministic": (lambda: not torch.are_deterministic_algorithms_enabled(), deterministic),
    "default dtype": (lambda: torch.get_default_dtype() is torch.float32, double), "cudnn": (lambda: torch.backends.cudnn.enabled, lambda: torch.backends.cudnn.flags(enabled=False)),
    "mkldnn": (lambda: torch.backends.mkldnn.enabled, lambda: torch.backends.mkldnn.flags(enabled=False)), "threads": (lambda: torch.get_num_threads() == 2, lambda: threads(1)),
    "attention": (torch.backends.cuda.flash_sdp_enabled, lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)),
    "inference mode": (lambda: not torch.is_inference_mode_enabled(), torch.inference_mode), "grad mode": (torch.is_grad_enabled, torch.no_grad),
}


@pytest.mark.parametrize("first", [False, True], ids=["plain first", "state first"])
@pytest.mark.parametrize("name", ASKED)
def test_programs_that_ask_for_state(name, first):
    asks, state = ASKED[name]

    def f(x):
        return x.sin() * 2 if asks() else x.cos() * 3
    compiled, x, answers = vitrify.compile(f), torch.linspace(0, 1, 5), []
    with threads(2):
        for n in range(4):
            with state() if n % 2 != first else contextlib.nullcontext():
                answers.append(asks())
                torch.testing.assert_close(compiled(x), f(x))
    assert answers == [first != (n % 2 == 0) for n in range(4)]


@torch.library.custom_op("vitrify_state::asks", mutates_args=())
def asks(x: torch.Tensor) -> torch.Tensor:
    state = [torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision() == "high"]
    return x + sum(100 ** i * n for i, n in enumerate(state)) + (x @ x).double()


@asks.register_fake
def _(x):
    return torch.empty_like(x, dtype=torch.float64)


@torch.library.custom_op("vitrify_state::tells", mutates_args=("x",))
def tells(x: torch.Tensor) -> None:
    x.copy_(x @ x)


def in_place(x):
    x = x + 0
    tells(x)
    return x


AROUND = {
    "threads": lambda: threads(torch.get_num_threads() + 1), "deterministic": deterministic, "precision": lambda: setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "no oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False), "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.eager("around vitrify_state::asks", "around vitrify_state::tells", "under autocast, which it may see", some=True)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("call", [asks, in_place], ids=["asks", "tells"])
@pytest.mark.parametrize("name", AROUND)
def test_custom_ops_see_what_is_set_around_them(name, call, outside):
    def f(x):
        with contextlib.nullcontext() if outside else AROUND[name]():
            made = call(x)
        return made * 2 + 1
    compiled = vitrify.compile(f)
    x = torch.full((3, 3), 1.01)
    with torch.no_grad():
        for around in (contextlib.nullcontext, AROUND[name], contextlib.nullcontext):
            with around() if outside else contextlib.nullcontext():
                assert torch.equal(compiled(x), f(x))
