"""What users see when a call cannot be compiled, or when they make a mistake."""
import io
import random
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import expects
import pytest
import torch
import vitrify
from helpers import Net, same

X = torch.ones(2, 3)


def warned(f, *args):
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        result = f(*args)
    return result, [str(w.message) for w in log if issubclass(w.category, vitrify.VitrifyWarning)]


def uses_item(x):
    return x * float(x.sum().item())


def branches(x):
    if x.sum().item() > 0:
        return x + 1
    return x - 1


def uses_numpy(x):
    return torch.from_numpy(x.numpy() + 1)


@pytest.mark.parametrize("f, line", [(uses_item, "x.sum().item()"), (branches, "if x.sum().item() > 0"), (uses_numpy, "x.numpy()")])
def test_data_dependent_code_runs_eagerly_with_one_warning(f, line, delta):
    expects.eager("its data cannot be read" if f is uses_numpy else "reads a tensor's value: aten::item")
    g = vitrify.compile(f)
    out, messages = warned(lambda: [g(X), g(X), g(-X)])
    same(out, [f(X), f(X), f(-X)])
    assert len(messages) == 1
    number = next(i for i, text in enumerate(open(__file__), 1) if line in text)
    assert f"{f.__name__} runs eagerly" in messages[0] and f"{__file__}:{number} in {f.__name__}" in messages[0]
    assert delta.fallbacks == 1 and delta.eager_calls == 3 and delta.compiled_calls == 0


@pytest.mark.no_kernels("every program is refused")
@pytest.mark.parametrize("f", [uses_item, branches, uses_numpy])
def test_fullgraph_raises(f):
    with pytest.raises(vitrify.CaptureError, match=f"{f.__name__} cannot be captured.*test_messages.py"):
        vitrify.compile(f, fullgraph=True)(X)
    assert issubclass(vitrify.CaptureError, vitrify.Error) and issubclass(vitrify.Error, RuntimeError)


@pytest.mark.eager("reads a tensor's value: aten::item")
def test_swallowed_reads_are_not_captured(delta):
    def f(x):
        try:
            return x * float(x.sum())
        except Exception:
            return x * 0

    out, messages = warned(vitrify.compile(f), X)
    same(out, X * 6)
    assert len(messages) == 1


@pytest.mark.no_kernels("every program raises")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_users_exceptions_come_unchanged(fullgraph):
    class Mine(Exception):
        pass

    log = []

    def f(x, bad=True):
        log.append(type(x))
        raise Mine("as eager")

    with pytest.raises(Mine, match="^as eager$") as info:
        vitrify.compile(f, fullgraph=fullgraph)(X)
    assert info.value.__context__ is None and info.value.__cause__ is None

    def g(x):
        return x @ x

    with pytest.raises(RuntimeError) as eager:
        g(X)
    with pytest.raises(RuntimeError) as ours:
        vitrify.compile(g, fullgraph=fullgraph)(X)
    assert str(ours.value) == str(eager.value) and type(ours.value) is type(eager.value)


@pytest.mark.eager("it writes Python state on every call: log", "it writes Python state, as caches do at first: log")
def test_side_effects_happen_as_in_eager(delta):
    log = []

    def f(x):
        log.append(x.shape[0])
        return x * 2

    _, messages = warned(lambda: [vitrify.compile(f)(X)])
    g = vitrify.compile(f)
    log.clear()
    _, messages = warned(lambda: [g(X) for _ in range(5)])
    assert log == [2] * 5
    assert len(messages) == 1 and "writes Python state" in messages[0] and "log" in messages[0]


@pytest.mark.eager("it draws from Python's or numpy's random generator", "print() inside the program")
def test_print_and_python_random(capsys):
    @vitrify.compile
    def f(x):
        print("hello")
        return x + 1

    _, messages = warned(lambda: [f(X), f(X)])
    assert capsys.readouterr().out == "hello\nhello\n" and "print()" in messages[0]

    @vitrify.compile
    def g(x):
        return x * random.random()

    random.seed(3)
    got, messages = warned(lambda: [g(X), g(X)])
    random.seed(3)
    same(got, [X * random.random(), X * random.random()])
    assert "random" in messages[0]


@pytest.mark.eager("it changes a container that was passed in", "the result holds a container that was passed in")
def test_changed_argument_containers():
    def f(items, x):
        items.append(x + 1)
        return items

    a, b = [], []
    g = vitrify.compile(f)
    out, messages = warned(lambda: g(a, X))
    same(out, f(b, X))
    assert out is a and len(a) == 1 and len(messages) == 1
    out, messages = warned(vitrify.compile(lambda d: d), {"x": X})
    assert len(messages) == 1


@pytest.mark.parametrize("make, what", [
    (lambda: X.to_sparse(), "sparse"), (lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), "quantized"), (lambda: X.to("meta"), "meta"),
    (lambda: torch.nested.nested_tensor([X, X], layout=torch.strided), "nested"), (lambda: X.as_subclass(type("Mine", (torch.Tensor,), {})), "subclass"),
])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_out_of_scope(make, what, delta):
    expects.eager(what)
    x = make()
    f = vitrify.compile(lambda x: x.clone())
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        out = f(x), f(x)
    messages = [str(w.message) for w in log if issubclass(w.category, vitrify.VitrifyWarning)]
    assert type(out[0]) is type(x) and out[0].layout == x.layout and out[0].device == x.device
    assert len(messages) == 1 and what in messages[0]
    assert delta.compiled_calls == 0
    with pytest.raises(vitrify.CaptureError, match=what):
        vitrify.compile(lambda x: x.clone(), fullgraph=True)(x)


@pytest.mark.parametrize("kw, message", [
    (dict(mode="max-autotun"), "unknown mode 'max-autotun'; did you mean .*'max-autotune'"),
    (dict(mode=3), "mode takes a string, not int"),
    (dict(options={"recompile_limt": 3}), "recompile_limt.*recompile_limit"),
    (dict(options={"recompile_limit": "many"}), "recompile_limit"),
    (dict(options={"verify": 3.5}), "verify"),
    (dict(options=["x"]), "options takes a dict, not list"),
    (dict(options={3: 1}), "strings"),
    (dict(fullgraph="yes"), "fullgraph takes True or False, not str"),
    (dict(dynamic=2.0), "dynamic takes"),
])
@pytest.mark.no_kernels("nothing is called")
def test_option_errors(kw, message):
    with pytest.raises(vitrify.OptionError, match=message):
        vitrify.compile(lambda x: x, **kw)
    with pytest.raises(vitrify.OptionError, match=message):
        vitrify.compile_(Net(), **kw)


@pytest.mark.no_kernels("nothing is called")
def test_wrong_targets():
    for bad in (3, "x", Net, [1]):
        with pytest.raises(vitrify.OptionError, match="takes a module or a function"):
            vitrify.compile(bad)
    with pytest.raises(vitrify.OptionError, match="takes a module"):
        vitrify.compile_(len)
    with pytest.raises(vitrify.OptionError, match="dimension 4"):
        vitrify.mark_dynamic(X, 4)


@pytest.mark.eager("recompile_limit is reached")
def test_recompile_limit(delta):
    f = vitrify.compile(lambda x, k: x * k, options={"recompile_limit": 3})
    out, messages = warned(lambda: [f(X, k) for k in range(6)])
    same(out, [X * k for k in range(6)])
    assert delta.captures == 3 and delta.eager_calls == 3
    assert len(messages) == 1 and "recompile_limit=3" in messages[0]
    same(f(X, 1), X)
    assert delta.compiled_calls == 4
    g = vitrify.compile(lambda x, k: x * k, options={"recompile_limit": 1}, fullgraph=True)
    g(X, 1)
    with pytest.raises(vitrify.RecompileError):
        g(X, 2)


def test_error_on_recompile():
    f = vitrify.compile(lambda x: x * 2, options={"error_on_recompile": True}, dynamic=False)
    f(X)
    with pytest.raises(vitrify.RecompileError, match=r"\[5, 3\].*\[2, 3\]"):
        f(torch.ones(5, 3))


@pytest.mark.eager("internal error while compiling: MemoryError", "internal error while compiling: src/x.cpp:1: check failed: a == b")
def test_internal_failure_gives_eager_and_a_reproducer(monkeypatch, delta):
    from vitrify import _C

    def broken(program, options):
        raise _C.CompilerError("src/x.cpp:1: check failed: a == b")

    monkeypatch.setattr(_C, "compile", broken)
    f = vitrify.compile(lambda x: x * 2)
    out, messages = warned(lambda: [f(X), f(X)])
    same(out, [X * 2, X * 2])
    assert len(messages) == 1 and "check failed" in messages[0] and "vitrify-opt" in messages[0]
    path = messages[0].split("Reproducer: ")[1].split(" ")[0]
    text = open(path).read()
    assert "check failed" in text and "aten::mul" in text and "# inputs:" in text
    replay = subprocess.run([sys.executable, "-m", "vitrify", "replay", path], capture_output=True, text=True)
    assert replay.returncode == 0 and "compiled: 1 launches" in replay.stdout, replay.stderr
    tool = next(iter(Path(_C.__file__).resolve().parent.glob("tools/vitrify-opt")), None)
    if tool:  # a wheel has only the other command
        assert "aten::mul" in subprocess.run([tool, path], capture_output=True, text=True, check=True).stdout
    with pytest.raises(vitrify.CompilerError) as info:
        vitrify.compile(lambda x: x * 2, fullgraph=True)(X)
    assert info.value.reproducer.endswith(".vt")
    monkeypatch.setattr(_C, "compile", lambda p, o: (_ for _ in ()).throw(MemoryError()))
    out, messages = warned(vitrify.compile(lambda x: x * 3), X)
    same(out, X * 3)
    assert "MemoryError" in messages[0]


def test_keyboard_interrupt_leaves_a_working_state(delta):
    hit = []

    def f(x):
        if torch.compiler.is_compiling() and not hit:
            hit.append(1)
            raise KeyboardInterrupt
        return x + 1

    g = vitrify.compile(f)
    with pytest.raises(KeyboardInterrupt):
        g(X)
    assert not torch.compiler.is_compiling() and not vitrify.is_compiling()
    hit.append(1)
    same(torch.ones(2) + 1, torch.full((2,), 2.0))
    same(vitrify.compile(lambda x: x + 1)(X), X + 1)
    same(g(X), X + 1)


@pytest.mark.eager("a TorchDispatchMode is active", "the call is inside a torch.func transform")
def test_other_modes_run_eagerly(delta):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, f, t, a=(), k=None):
            self.n += 1
            return f(*a, **(k or {}))

    f = vitrify.compile(lambda x: x * 2 + 1)
    f(X)
    with Count() as c:
        out, messages = warned(f, X)
    same(out, X * 2 + 1)
    assert c.n == 2 and "TorchDispatchMode" in messages[0]
    out, messages = warned(lambda: torch.vmap(f)(X))
    same(out, X * 2 + 1)
    assert "torch.func" in messages[0]
    f(X)
    assert delta.compiled_calls == 2


def test_threads_compile_one_signature_once(delta):
    m = Net().requires_grad_(False)
    t = vitrify.compile(m)
    want, got, gate = m(X), [None] * 8, threading.Barrier(8)

    def work(i):
        gate.wait()
        for _ in range(20):
            got[i] = t(X)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [th.start() for th in threads]
    [th.join() for th in threads]
    for g in got:
        same(g, want)
    assert delta.captures == 1 and delta.compiled_calls == 160


def test_threads_compile_different_models(delta):
    models = [Net().requires_grad_(False) for _ in range(4)]
    errors = []

    def work(m):
        try:
            same(vitrify.compile(m)(X), m(X))
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(m,)) for m in models]
    [th.start() for th in threads]
    [th.join() for th in threads]
    assert not errors and delta.captures == 4


def test_rng_state_is_as_in_eager(delta):
    def f(x):
        return x + torch.rand(2, 3), torch.randn(3)

    g = vitrify.compile(f)
    for _ in range(2):
        torch.manual_seed(5)
        want, state = f(X), torch.get_rng_state()
        torch.manual_seed(5)
        same(g(X), want)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.no_kernels("runs in a process of its own")
@pytest.mark.parametrize("command, text", [("options", "recompile_limit"), ("doctor", "torch")])
def test_command_line(command, text):
    r = subprocess.run([sys.executable, "-m", "vitrify", command], capture_output=True, text=True)
    assert r.returncode == 0 and text in r.stdout, r.stderr
