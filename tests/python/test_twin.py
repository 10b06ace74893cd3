"""The twin of a module stands in for it everywhere (docs/python-door.md)."""
import copy
import functools
import gc
import inspect
import io
import os
import pickle
import weakref
from typing import Generic, TypeVar

import bounds
import pytest
import torch
import torch.nn.utils.parametrize as parametrize
import vitrify
from helpers import Net, frozen, same
from torch import nn

twin = vitrify.compile
X = torch.ones(2, 3)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class CustomReduce(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def __reduce__(self):
        return CustomReduce, (self.k,)


class Sub(Net):
    def forward(self, x):
        return super().forward(x) + 1


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


def check(t, m, x=X, native=True):
    """The twin's call agrees with the module's, twice, and ran compiled."""
    before = vitrify.counters["compiled_calls"]
    for _ in range(2):
        same(t(x), m(x))
    if native:
        assert vitrify.counters["compiled_calls"] == before + 2


def test_calls_run_native(delta, no_warnings):
    m = frozen(Net())
    check(twin(m), m)
    assert delta.captures == 1 and delta.eager_calls == 0 and delta.kernels_launched > 0


def test_explicit_call_forms(delta):
    m = Net()
    t = twin(m)
    same(t.__call__(X), m(X))
    same(type(t).__call__(t, x=X), m(X))
    assert delta.eager_calls == 0 and delta.captures == 2


def test_pickle():
    t = twin(Net())
    p = pickle.loads(pickle.dumps(t))
    assert type(p) is Net and p.__dict__ is not t.__dict__
    same(p(X), t(X))


@pytest.mark.no_kernels("nothing is compiled")
def test_torch_save():
    b = io.BytesIO()
    torch.save(twin(Net()), b)
    b.seek(0)
    assert type(torch.load(b, weights_only=False)) is Net


@pytest.mark.no_kernels("nothing is compiled")
def test_pickle_of_own_reduce():
    p = pickle.loads(pickle.dumps(twin(CustomReduce(5))))
    assert type(p) is CustomReduce and p.k == 5


def test_deepcopy_and_copy_give_twins(delta):
    m = Net()
    t = twin(m)
    for c in (copy.deepcopy(t), copy.copy(t)):
        assert c.__class__ is Net and type(c) is type(t) and c.__dict__ is not t.__dict__
        check(c, m)
    d = copy.deepcopy(t)
    assert d.l.weight is not t.l.weight
    assert delta.eager_calls == 0


def test_setstate_and_replaced_dict():
    m = Net()
    t = twin(m)
    m.__setstate__(Net().__dict__)
    assert t.__dict__ is m.__dict__
    check(t, m)
    m.__dict__ = dict(Net().__dict__)
    check(t, m)
    assert t.l is m.l and t.__dict__ is m.__dict__


def test_to_train_eval_load_state_dict():
    m = Net()
    t = twin(m)
    assert t.to(torch.float64) is t and m.l.weight.dtype == torch.float64
    check(t, m, X.double())
    assert t.eval() is t and not m.training
    assert list(t.state_dict()) == list(m.state_dict()) == ["b", "l.weight", "l.bias"]
    m.load_state_dict({k: v + 1 for k, v in t.state_dict().items()})
    check(t, m, X.double())
    assert t.train() is t and m.training


def test_hooks_on_either(delta):
    m = Net()
    t = twin(m)
    check(t, m)
    h1 = m.register_forward_hook(lambda mod, i, o: o + 1)
    check(t, m)
    h2 = t.register_forward_pre_hook(lambda mod, i: (i[0] * 2,))
    check(t, m)
    same(t(X), torch.relu(m.l(X * 2)) * m.b + 1)
    h1.remove(), h2.remove()
    same(t(X), torch.relu(m.l(X)) * m.b)
    assert delta.captures >= 3 and delta.eager_calls == 0


@pytest.mark.eager("it writes Python state, as caches do at first: seen")
def test_hook_sees_the_original():
    m, seen = Net(), []
    t = twin(m)
    m.register_forward_hook(lambda mod, i, o: seen.append(mod is m))
    t(X)
    assert all(seen) and seen


def test_global_hooks():
    m = Net()
    t = twin(m)
    check(t, m)
    h = nn.modules.module.register_module_forward_hook(lambda mod, i, o: o * 2)
    try:
        check(t, m)
    finally:
        h.remove()
    check(t, m)


@pytest.mark.no_kernels("nothing is compiled")
def test_as_a_child_next_to_the_original():
    p = nn.Module()
    p.a = m = Net()
    p.b = twin(m)
    assert len(list(p.parameters())) == 2 and [n for n, _ in p.named_modules()] == ["", "a", "a.l", "b"]


@pytest.mark.no_kernels("nothing is compiled")
def test_identity_and_types():
    m = Net()
    t = twin(m)
    assert m != t and t not in {m} and t.__class__ is Net and isinstance(t, Net) and t.__class__ in (Net,)
    assert type(t) is not Net and type(t).__name__ == "Net" and type(t).__qualname__ == Net.__qualname__


def test_super_forms(delta):
    m = Sub()
    check(twin(m), m)

    class Odd(Net):
        def forward(self, x):
            return super(type(self), self).forward(x) * 2

    m = Odd()
    check(twin(m), m)
    assert delta.eager_calls == 0


def test_registries_and_back_references():
    registry = set()

    class R(Net):
        def __init__(self):
            super().__init__()
            object.__setattr__(self.l, "parent", self)
            registry.add(self)

        def forward(self, x):
            return super().forward(x) + (1 if self in registry and self.l.parent is self else 100)

    m = R()
    check(twin(m), m)


def test_slots():
    class S(nn.Module):
        __slots__ = ("q",)

        def __init__(self):
            super().__init__()
            self.q = 3
            self.l = nn.Linear(3, 3)

        def forward(self, x):
            return self.l(x) * self.q

    m = S()
    t = twin(m)
    check(t, m)
    t.q = 5
    assert m.q == t.q == 5


class Meta(type):
    made = []

    def __new__(mcs, name, bases, body, **kw):
        cls = super().__new__(mcs, name, bases, body, **kw)
        Meta.made.append(name)
        return cls

    def __init__(cls, name, bases, body, **kw):
        super().__init__(name, bases, body)


def test_metaclass_and_init_subclass():
    class A(nn.Module, metaclass=Meta):
        subs = []

        def __init_subclass__(cls, *, tag, **kw):
            A.subs.append(cls.__name__)

        def forward(self, x):
            return x * 2

    class B(A, tag=1):
        pass

    made = len(Meta.made)
    m = B()
    check(twin(m), m)
    assert len(Meta.made) == made and A.subs == ["B"]


def test_init_subclass_that_refuses():
    class A(nn.Module):
        def __init_subclass__(cls, **kw):
            if cls.__name__ != "B" or getattr(A, "closed", False):
                raise TypeError("no more subclasses")
            A.closed = True

        def forward(self, x):
            return x + 1

    class B(A):
        pass

    m = B()
    check(twin(m), m)


@pytest.mark.no_kernels("nothing is compiled")
def test_properties_and_cached_properties():
    class P(Net):
        @functools.cached_property
        def c(self):
            return object()

        @property
        def w(self):
            return self.l.weight

    m = P()
    t = twin(m)
    assert t.c is m.c and t.w is m.w


@pytest.mark.parametrize("on_twin", [False, True])
def test_parametrize(on_twin):
    m = nn.Linear(3, 3)
    t = twin(m)
    check(t, m)
    parametrize.register_parametrization(t if on_twin else m, "weight", Symmetric())
    assert t.__class__ is m.__class__ and "weight" not in m._parameters
    check(t, m)
    same(m(X), X @ (m.parametrizations.weight.original.triu() + m.parametrizations.weight.original.triu(1).T).T + m.bias)
    parametrize.remove_parametrizations(m if on_twin else t, "weight")
    check(t, m)
    assert t.__class__ is nn.Linear is type(m)


@pytest.mark.eager("it writes Python state, as caches do at first: self.weight")
def test_weight_norm_old_and_new():
    m = nn.Linear(3, 3)
    t = twin(m)
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(m)
    same(t(X), m(X))
    m = nn.Linear(3, 3)
    t = twin(m)
    torch.nn.utils.parametrizations.weight_norm(m)
    same(t(X), m(X))


@pytest.mark.parametrize("twin_first", [pytest.param(True, marks=pytest.mark.eager("a lazy module has no parameters")), False])
def test_lazy_module(twin_first):
    m = nn.LazyLinear(4)
    t = twin(m)
    (t if twin_first else m)(X)
    assert type(m) is nn.Linear and t.__class__ is nn.Linear
    check(t, m)


@pytest.mark.eager("it holds a TorchScript module")
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
def test_script_modules():
    m = nn.Linear(3, 3)
    for s in (torch.jit.script(m), torch.jit.trace(m, X)):
        same(twin(s)(X), m(X))
    same(torch.jit.script(twin(m))(X), m(X))


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
def test_parameters_as_arguments(delta):
    p = nn.Parameter(torch.ones(3), requires_grad=False)
    f = vitrify.compile(lambda x: x * 2 if isinstance(x, nn.Parameter) else x * 3)
    same(f(p), torch.full((3,), 2.0))
    same(f(p.data), torch.full((3,), 3.0))
    assert delta.captures == 2


def test_weakrefs_and_collection():
    m = Net()
    t = twin(m)
    t(X)
    w, wt = weakref.ref(m), weakref.ref(t)
    del m
    gc.collect()
    assert w() is not None
    del t
    gc.collect()
    assert w() is None and wt() is None


@pytest.mark.no_kernels("nothing is compiled")
def test_one_class_for_all_twins():
    before = len(Net.__subclasses__())
    twins = [twin(Net()) for _ in range(100)]
    assert len({type(t) for t in twins}) == 1 and len(Net.__subclasses__()) <= before + 1


@pytest.mark.no_kernels("nothing is compiled")
def test_del_runs_once():
    log = []

    class D(Net):
        def __del__(self):
            log.append(1)

    m = D()
    t = twin(m)
    del m, t
    gc.collect()
    assert log == [1]


def test_signature_and_mangling():
    class N(nn.Module):
        def __init__(self):
            super().__init__()
            self.__x = 2

        def forward(self, x, *, k=1):
            return x * self.__x * k

    m = N()
    t = twin(m)
    assert str(inspect.signature(t.forward)) == "(x, *, k=1)"
    check(t, m)
    same(t(X, k=3), m(X, k=3))


def test_generic_module():
    K = TypeVar("K")

    class G(nn.Module, Generic[K]):
        def forward(self, x):
            return x * 2

    for m in (G[int](), G()):
        check(twin(m), m)


def test_replicate_for_data_parallel():
    t = twin(Net())
    r = t._replicate_for_data_parallel()
    assert r.__dict__ is not t.__dict__
    r.l = t.l
    r._parameters, r._buffers = t._parameters, t._buffers
    same(r.forward(X), t(X))
    assert r.__class__ is Net


def test_instance_forward_override():
    m = Net()
    t = twin(m)
    check(t, m)
    m.forward = lambda x: x * 0
    same(t(X), X * 0)


def test_class_forward_replaced(monkeypatch):
    class C(Net):
        pass

    m = C()
    t = twin(m)
    check(t, m)
    monkeypatch.setattr(C, "forward", lambda self, x: x * 5, raising=False)
    same(t(X), X * 5)


@pytest.mark.no_kernels("nothing is compiled")
def test_apply_passes_the_twin():
    t, seen = twin(Net()), []
    t.apply(seen.append)
    assert seen[-1] is t


@pytest.mark.no_kernels("nothing is compiled")
def test_quantize_type_map():
    q = torch.ao.quantization.quantize_dynamic(twin(nn.Sequential(nn.Linear(3, 3))), {nn.Linear})
    assert "quantized" in type(q[0]).__module__


def test_averaged_model_and_functional_call():
    t = twin(Net())
    a = torch.optim.swa_utils.AveragedModel(t)
    a.update_parameters(t)
    assert a.module.__class__ is Net
    y = torch.func.functional_call(t, {k: v * 0 for k, v in t.named_parameters()}, (X,))
    assert y.abs().sum() == 0


@pytest.mark.eager("argument 0 is a tensor subclass (FakeTensor)")
def test_export():
    assert type(torch.export.export(twin(Net()), (X,))).__name__ == "ExportedProgram"


def test_full_backward_hook():
    m, seen = Net(), []
    t = twin(m)
    m.register_full_backward_hook(lambda mod, gi, go: seen.append(mod is m))
    with torch.enable_grad():
        t(X.clone().requires_grad_()).sum().backward()
    assert seen == [True] and m.l.weight.grad is not None


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('pg')}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.eager("it holds a distributed module (DistributedDataParallel)")
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
def test_ddp(process_group):
    from torch.nn.parallel import DistributedDataParallel as DDP

    with torch.enable_grad():
        m = Net()
        d = DDP(twin(m), static_graph=True)
        for _ in range(3):
            d(X).sum().backward()
        assert m.l.weight.grad is not None and list(d.state_dict())[0].startswith("module.")
        d = DDP(Net())
        t = twin(d)
        for _ in range(2):
            t(X).sum().backward()
        with t.no_sync():
            t(X).sum().backward()
        assert t.reducer is d.reducer


@pytest.mark.eager("it holds a distributed module (FSDPNet)")
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
@pytest.mark.parametrize("on_twin", [False, True])
def test_fsdp2(process_group, on_twin):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    m = Net()
    t = twin(m)
    fully_shard(t if on_twin else m, mesh=init_device_mesh("cpu", (1,)))
    assert t.__class__ is m.__class__ is not Net
    assert t(X).shape == (2, 4)


def test_hf(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50)
    t = twin(transformers.BertModel(config).eval())
    t.save_pretrained(tmp_path)
    b = transformers.BertModel.from_pretrained(tmp_path).eval()
    ids = torch.tensor([[1, 2]])
    torch.testing.assert_close(b(ids).last_hidden_state, t(ids).last_hidden_state, **bounds.SUMS)
    assert b.config.architectures == ["BertModel"]


def test_compile_in_place(delta):
    m = Net()
    assert vitrify.compile_(m) is m and type(m) is Net
    want = torch.relu(m.l(X)) * m.b
    for _ in range(2):
        same(m(X), want)
    assert delta.compiled_calls == 2 and delta.eager_calls == 0
    assert pickle.loads(pickle.dumps(m))._compiled_call_impl is None
    assert copy.deepcopy(m)._compiled_call_impl is None
    ref = weakref.ref(m)
    del m
    gc.collect()
    assert ref() is None


def test_module_attributes_are_guarded(delta):
    class A(Net):
        def __init__(self):
            super().__init__()
            self.k, self.sizes, self.config = 2, [1, 2], {"act": "relu"}

        def forward(self, x):
            y = self.l(x) * self.k + sum(self.sizes)
            return torch.relu(y) if self.config["act"] == "relu" else torch.tanh(y)

    m = A()
    t = twin(m)
    check(t, m)
    m.k = 3
    check(t, m)
    m.sizes.append(5)
    check(t, m)
    t.config["act"] = "tanh"
    check(t, m)
    m.l = nn.Linear(3, 4)
    check(t, m)
    m.l.weight = nn.Parameter(torch.zeros(4, 3))
    check(t, m)
    m.l.weight.data = torch.ones(4, 3)
    check(t, m)
    assert delta.eager_calls == 0 and delta.captures == 6


def test_train_and_eval_keep_both_entries(delta):
    class D(Net):
        def forward(self, x):
            return super().forward(x) * (2 if self.training else 3)

    m = D()
    t = twin(m)
    for _ in range(4):
        check(t.train(), m)
        check(t.eval(), m)
    assert delta.captures == 2


@pytest.mark.eager("it writes Python state on every call: self.steps", "it writes Python state, as caches do at first: self.steps")
def test_attribute_writes_run_eagerly(delta):
    class Counting(Net):
        steps = 0

        def forward(self, x):
            self.steps += 1
            return super().forward(x)

    m = Counting()
    t = twin(m)
    with pytest.warns(vitrify.VitrifyWarning, match="writes Python state.*steps"):
        for i in range(5):
            t(X)
    assert m.steps == 5


@pytest.mark.eager("as caches do at first: self.table")
def test_caches_filled_on_the_first_call(delta, no_warnings):
    class Cached(Net):
        table = None

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(4.0)
            return super().forward(x) + self.table

    m = Cached()
    t = twin(m)
    for _ in range(4):
        same(t(X), torch.relu(m.l(X)) * m.b + torch.arange(4.0))
    assert m.table.tolist() == [0, 1, 2, 3] and delta.compiled_calls == 3
