"""vitrify.compile on functions: binding, structures, guards."""
import collections
import dataclasses
import functools
import inspect
import pickle
import types

import pytest
import torch
import vitrify
from helpers import Net, frozen, same


def add_one(x):
    return x + 1


compiled_add_one = vitrify.compile(add_one)


@vitrify.compile
def pickled(x, k=2):
    "Doc."
    return x * k


def test_runs_native(delta, no_warnings):
    f = vitrify.compile(add_one)
    x = torch.randn(16)
    for _ in range(3):
        same(f(x), add_one(x))
    assert delta.captures == 1 and delta.compiled_calls == 3 and delta.eager_calls == 0 and delta.fallbacks == 0
    assert delta.kernels_built == 1 and delta.kernels_launched == 3


def test_decorator_with_arguments(delta):
    @vitrify.compile(fullgraph=True, mode="reduce-overhead")
    def f(x):
        return x.sin().cos()

    x = torch.randn(4, 5)
    same(f(x), x.sin().cos())
    assert delta.compiled_calls == 1


def test_signature_doc_pickle_and_isfunction():
    assert inspect.isfunction(pickled) and pickled.__doc__ == "Doc." and str(inspect.signature(pickled)) == "(x, k=2)"
    assert pickle.loads(pickle.dumps(pickled)) is pickled
    same(functools.partial(pickled, k=3)(torch.ones(2)), torch.ones(2) * 3)


def test_binding_forms(delta):
    class A:
        def __init__(self):
            self.k = 2.0

        @vitrify.compile
        def method(self, x):
            return x * self.k

        @classmethod
        @vitrify.compile
        def cls_method(cls, x):
            return x * 3

        @staticmethod
        @vitrify.compile
        def static(x):
            return x * 4

        @property
        @vitrify.compile
        def prop(self):
            return torch.full((3,), self.k) + 1

    a, x = A(), torch.randn(5)
    same(a.method(x), x * 2)
    same(A.method(a, x), x * 2)
    same(A.cls_method(x), x * 3)
    same(a.static(x), x * 4)
    same(a.prop, torch.full((3,), 3.0))
    a.k = 5.0
    same(a.method(x), x * 5)
    same(vitrify.compile(a.method)(x), x * 5)
    assert delta.eager_calls == 0


def test_keywords_and_defaults(delta):
    @vitrify.compile
    def f(x, *args, scale=1.0, **kw):
        y = x * scale
        for a in args:
            y = y + a
        return y - kw.get("shift", 0)

    x = torch.randn(3)
    same(f(x), x * 1.0)
    same(f(x, x, 2), x * 1.0 + x + 2)
    same(f(x, scale=2.0, shift=1), x * 2.0 - 1)
    same(f(x, scale=3.0, shift=1), x * 3.0 - 1)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        f()
    assert delta.fallbacks == 0


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Out:
    y: torch.Tensor
    n: int = 3
    extra: object = None


def test_structures(delta, no_warnings):
    def f(d, pair, items):
        y = d["x"] + pair.a
        return {"y": y, "n": len(items), "list": [y * i for i in items]}, Pair(y, pair.b), Out(y * 2), (y.shape, None, "s"), collections.OrderedDict(z=y)

    args = ({"x": torch.randn(3)}, Pair(torch.randn(3), 7), [1, 2.5])
    g = vitrify.compile(f)
    for _ in range(2):
        got, want = g(*args), f(*args)
        assert type(got[2]) is Out
        same(got[2].y, want[2].y)
        same(got[:2] + got[3:], want[:2] + want[3:])
    assert delta.captures == 1 and delta.compiled_calls == 2


def test_model_output(delta):
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def f(x):
        return outputs.BaseModelOutput(last_hidden_state=x * 2, hidden_states=(x, x + 1))

    x = torch.randn(2, 3)
    g = vitrify.compile(f)
    for _ in range(2):
        got = g(x)
        assert type(got) is outputs.BaseModelOutput
        same(got.last_hidden_state, x * 2)
        same(got["hidden_states"][1], x + 1)
        assert got.hidden_states[0] is x
    assert delta.captures == 1 and delta.compiled_calls == 2


@pytest.mark.parametrize("a, b", [(1, 2), (1, True), (1.0, 1), ("sum", "mean"), (0.0, -0.0), (None, 1), (slice(0, 1), slice(0, 2)), (torch.float32, torch.float64)])
def test_guards_on_values(a, b, delta):
    def f(x, v):
        return x + len(repr(v)), v

    g, x = vitrify.compile(f), torch.randn(3)
    for v in (a, b, a):
        got, want = g(x, v), f(x, v)
        same(got[0], want[0])
        assert type(got[1]) is type(want[1]) and repr(got[1]) == repr(want[1])
    assert delta.captures == 2 and delta.eager_calls == 0


@pytest.mark.parametrize("change", [
    lambda x: x.double(), lambda x: x[:2], lambda x: x.t().contiguous().t(), lambda x: x[:, :2], lambda x: x.unsqueeze(0), lambda x: x.to(torch.int64),
    lambda x: x.to(torch.complex64).conj(), lambda x: torch.nn.Parameter(x, requires_grad=False),
])
def test_guards_on_metadata(change):
    def f(x):
        return x * 2 + x.dim(), isinstance(x, torch.nn.Parameter) or x.is_conj()

    g, x = vitrify.compile(f, dynamic=False), torch.randn(4, 4)
    g(x)
    y = change(x)
    same(g(y)[0], f(y)[0])
    same(g(x)[0], f(x)[0])


SCALE, TABLE = 2.0, [1.0, 2.0]
WEIGHT = torch.ones(3)


def helper(x):
    return x * SCALE + TABLE[0]


def test_guards_on_globals(monkeypatch, delta):
    f = vitrify.compile(lambda x: helper(x) * WEIGHT)
    x, me = torch.randn(3), globals()
    same(f(x), x * 2 + 1)
    monkeypatch.setitem(me, "SCALE", 3.0)
    same(f(x), x * 3 + 1)
    TABLE[0] = 5.0
    same(f(x), x * 3 + 5)
    TABLE[0] = 1.0
    monkeypatch.setitem(me, "WEIGHT", torch.full((3,), 2.0))
    same(f(x), (x * 3 + 1) * 2)
    monkeypatch.setitem(me, "helper", lambda x: x)
    same(f(x), x * 2)
    assert delta.eager_calls == 0
    monkeypatch.undo()
    same(f(x), x * 2 + 1)


def test_guards_on_closures_defaults_and_code(delta):
    k = 1.0

    def f(x, y=2.0):
        return x * k + y

    g, x = vitrify.compile(f), torch.randn(3)
    same(g(x), x + 2)
    k = 3.0
    same(g(x), x * 3 + 2)

    def h(x):
        return inner(x)

    def inner(x):
        return x + 1

    c = vitrify.compile(h)
    same(c(x), x + 1)
    inner.__code__ = (lambda x: x + 2).__code__
    same(c(x), x + 2)
    assert delta.captures == 4


def test_globals_written_elsewhere_cost_nothing(delta):
    f, x = vitrify.compile(add_one), torch.randn(3)
    f(x)
    for i in range(5):
        globals()["unrelated"] = i
        f(x)
    assert delta.captures == 1 and delta.compiled_calls == 6


def test_guards_on_modes(delta):
    @vitrify.compile
    def f(x):
        return x * 2 if torch.is_grad_enabled() else x * 3, torch.zeros(2), x @ x

    x = torch.randn(4, 4)
    same(f(x)[0], x * 2)
    with torch.no_grad():
        same(f(x)[0], x * 3)
    with torch.inference_mode():
        got = f(x)
        same(got[0], x * 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert f(x)[2].dtype == torch.bfloat16
    assert f(x)[2].dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert f(x)[1].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert f(x)[1].dtype == torch.float32
    assert delta.eager_calls == 0


def test_default_device(delta):
    @vitrify.compile
    def f(x):
        return x + 1, torch.get_default_device().type

    with torch.device("cpu"):
        same(f(torch.ones(2))[0], torch.full((2,), 2.0))
    assert delta.eager_calls == 0


@pytest.mark.eager("which shares memory with input")
def test_aliasing_of_inputs(delta):
    def f(a, b):
        a.mul_(2)
        return a + b

    g = vitrify.compile(f)
    for make in (lambda: (torch.ones(4), torch.ones(4)), lambda: (lambda t: (t, t))(torch.ones(4)), lambda: (lambda t: (t[:4], t[2:6]))(torch.arange(6.0)),
                 lambda: (lambda t: (t[2:6], t[:4]))(torch.arange(6.0)), lambda: (torch.ones(4), torch.ones(4))):
        a, b = make()
        c, d = make()
        same(g(a, b), f(c, d))
        same((a, b), (c, d))


def test_inputs_returned_keep_identity():
    g, x = vitrify.compile(lambda x: (x, x[0], x + 1)), torch.randn(3, 3)
    for _ in range(2):
        a, b, _ = g(x)
        assert a is x and b.data_ptr() == x.data_ptr()


def test_mutated_input(delta):
    g, x = vitrify.compile(lambda x: x.add_(1)), torch.zeros(3)
    v = x._version
    for i in range(3):
        assert g(x) is x
    same(x, torch.full((3,), 3.0))
    assert x._version == v + 3 and delta.compiled_calls == 3


def test_nested_compiled_is_traced_through(delta):
    inner = vitrify.compile(lambda x: x + 1)
    outer, x = vitrify.compile(lambda x: inner(x) * 2), torch.randn(3)
    same(outer(x), (x + 1) * 2)
    assert delta.captures == 1


def test_recursion(delta):
    @vitrify.compile
    def f(x, n):
        return x if n == 0 else f(x * 2, n - 1)

    same(f(torch.ones(3), 3), torch.full((3,), 8.0))
    assert delta.captures == 1


def test_is_compiling_during_capture():
    @vitrify.compile
    def f(x):
        return x + (10 * torch.compiler.is_compiling() + vitrify.is_compiling())

    same(f(torch.ones(2)), torch.full((2,), 12.0))
    assert not torch.compiler.is_compiling() and not vitrify.is_compiling()


def test_compile_of_other_callables(delta):
    x = torch.randn(3)
    same(vitrify.compile(torch.sin)(x), x.sin())
    same(vitrify.compile(functools.partial(torch.add, alpha=2))(x, x), x + 2 * x)
    f = vitrify.compile(vitrify.compile(add_one), mode="max-autotune")
    same(f(x), x + 1)
    assert delta.eager_calls == 0


def test_module_in_closure(delta):
    net, x = frozen(Net()), torch.randn(2, 3)
    f = vitrify.compile(lambda x: net(x) + 1)
    same(f(x), net(x) + 1)
    net.b.add_(1)  # same buffer, new contents: read live
    same(f(x), net(x) + 1)
    net.b = torch.zeros(4)
    same(f(x), net(x) + 1)
    assert delta.captures == 2 and delta.eager_calls == 0


def test_dynamic_sizes_after_first_miss(delta):
    f = vitrify.compile(lambda x: x.sum(0) * 2)
    for n in (4, 5, 6, 7, 8, 9, 10, 11, 12, 13):
        x = torch.randn(n, 3)
        same(f(x), x.sum(0) * 2)
    assert delta.captures <= 9


@pytest.mark.parametrize("mark", ["dynamic", "mark_dynamic", "maybe", "static"])
def test_dynamic_marks_give_right_results(mark):
    f = vitrify.compile(lambda x: torch.softmax(x * x.shape[0], -1), dynamic=True if mark == "dynamic" else None)
    for n in (2, 3, 7, 1, 5):
        x = torch.randn(n, 4)
        if mark == "mark_dynamic":
            vitrify.mark_dynamic(x, 0) if n > 1 else None
        elif mark == "maybe":
            vitrify.maybe_mark_dynamic(x, 0)
        elif mark == "static":
            vitrify.mark_static(x)
        same(f(x), torch.softmax(x * n, -1))


def test_reset(delta):
    f, x = vitrify.compile(add_one), torch.ones(2)
    f(x)
    vitrify.reset()
    assert vitrify.counters["captures"] == 0
    same(f(x), x + 1)
    assert vitrify.counters["captures"] == 1


@pytest.mark.no_kernels("nothing is compiled")
def test_counters_are_read_only():
    with pytest.raises(TypeError):
        vitrify.counters["captures"] = 3
    assert set(vitrify.counters) >= {"captures", "kernels_built", "kernels_launched", "fallbacks", "eager_calls"}


@pytest.mark.eager("compilation is off", "host is disabled")
def test_disable(delta):
    f = vitrify.compile(add_one, disable=True)
    same(f(torch.ones(2)), torch.full((2,), 2.0))
    assert delta.captures == 0

    @vitrify.disable
    def host(x):
        return x + x.sum().item()

    @vitrify.compile
    def g(x):
        return host(x) * 2

    with pytest.warns(vitrify.VitrifyWarning, match="disabled"):
        same(g(torch.ones(2)), torch.full((2,), 6.0))
    assert vitrify.compile(host) is host


def test_metrics(tmp_path):
    vitrify.compile(add_one)(torch.ones(3))
    m = vitrify.metrics()
    assert m["compile_us"]["capture"] > 0
    m.csv(tmp_path / "m.csv")
    m.json(tmp_path / "m.json")
    assert "counters.captures,1" in (tmp_path / "m.csv").read_text()
    assert "recompile_limit" in repr(vitrify.options())


def test_function_is_collected():
    import gc
    import weakref

    class Big:
        pass

    big = Big()
    ref = weakref.ref(big)

    def f(x):
        return x + (1 if big else 0)

    g = vitrify.compile(f)
    g(torch.ones(2))
    del big, f, g
    gc.collect()
    assert ref() is None
