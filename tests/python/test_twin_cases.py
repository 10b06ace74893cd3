"""More of what people do to a module: done to its twin or to the original, both agree with a module that was never compiled, and the twin still runs compiled."""
import copy
import io
import pickle
import threading
import warnings

import bounds
import pytest
import torch
import torch.nn.utils.parametrize as parametrize
import vitrify
from helpers import Net, same
from torch import nn

X = torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def agree(t, m, x=X):
    """The twin's call gives what an eager call of the original gives, twice, without a warning and through compiled code."""
    before = dict(vitrify.counters)
    with warnings.catch_warnings():
        warnings.simplefilter("error", vitrify.VitrifyWarning)
        want = [type(m).__call__(m, x) for _ in range(2)]  # may hold twins itself
        middle = vitrify.counters["compiled_calls"]
        same([t(x), t(x)], want)
    assert vitrify.counters["compiled_calls"] == middle + 2
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"]


class Doubled(nn.Module):
    def forward(self, w):
        return w * 2


def add_buffer(m):
    m.register_buffer("b", torch.full((4,), 3.0))


def replace_child(m):
    m.l = nn.Linear(3, 4)


def tie(m):
    m.l.bias = nn.Parameter(m.b + 1)


def assign(m):
    m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True)


def to_empty(m):
    m.to("meta").to_empty(device="cpu")
    for t in [*m.parameters(), *m.buffers()]:
        t.fill_(0.5)


def spectral(m):
    m.eval()
    torch.nn.utils.parametrizations.spectral_norm(m.l)


def prune(m):
    from torch.nn.utils import prune

    prune.l1_unstructured(m.l, "weight", 4)
    prune.remove(m.l, "weight")


def vector(m):
    torch.nn.utils.vector_to_parameters(torch.arange(16.0), m.parameters())


def step(m):
    with torch.enable_grad():
        m.l(X).sum().backward()
    torch.optim.SGD(m.parameters(), 0.1).step()
    m.zero_grad()


CHANGES = {
    "half precision": lambda m: m.bfloat16().float(),
    "share_memory": lambda m: m.share_memory(),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "a buffer again": add_buffer,
    "a child replaced": replace_child,
    "a parameter tied": tie,
    "load_state_dict(assign=True)": assign,
    "to_empty": to_empty,
    "spectral norm": spectral,
    "pruning": prune,
    "vector_to_parameters": vector,
    "a step of an optimizer": step,
    "apply": lambda m: m.apply(lambda c: c.weight.fill_(2.0) if isinstance(c, nn.Linear) else None),
    "a child deleted and set": lambda m: (lambda c: (delattr(m, "l"), m.add_module("l", c)))(m.l),
    "data of a parameter": lambda m: setattr(m.l.weight, "data", torch.ones(4, 3)),
    "a parametrization of a child": lambda m: parametrize.register_parametrization(m.l, "weight", Doubled()),
    "an unsafe parametrization taken away": lambda m: (parametrize.register_parametrization(m.l, "weight", Doubled(), unsafe=True),
                                                       parametrize.remove_parametrizations(m.l, "weight", leave_parametrized=True)),
    "a forward hook with kwargs": lambda m: m.register_forward_hook(lambda mod, a, k, out: out * 2, with_kwargs=True),
    "a pre-hook with kwargs": lambda m: m.register_forward_pre_hook(lambda mod, a, k: ((a[0] * 2,), k), with_kwargs=True),
    "a hook put first": lambda m: (m.register_forward_hook(lambda mod, a, out: out + 1), m.register_forward_hook(lambda mod, a, out: out * 2, prepend=True)),
    "a hook on a child": lambda m: m.l.register_forward_hook(lambda mod, a, out: -out),
    "a hook removed": lambda m: m.register_forward_hook(lambda mod, a, out: out + 1).remove(),
}


@pytest.mark.parametrize("on_twin", [False, True], ids=["original", "twin"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes(name, on_twin):
    m = Net()
    t, plain = vitrify.compile(m), copy.deepcopy(m)
    agree(t, m)
    torch.manual_seed(3)
    CHANGES[name](t if on_twin else m)
    torch.manual_seed(3)
    CHANGES[name](plain)
    agree(t, m)
    same(t(X), plain(X))
    assert list(t.state_dict()) == list(m.state_dict()) == list(plain.state_dict())
    assert t.__class__ is type(m) and [n for n, _ in t.named_modules()] == [n for n, _ in m.named_modules()]


@pytest.mark.parametrize("name", ["a child replaced", "spectral norm", "a parametrization of a child", "a hook on a child", "data of a parameter", "to_empty"])
def test_changes_of_a_module_compiled_in_place(name):
    m = Net()
    plain = copy.deepcopy(m)
    vitrify.compile_(m)
    for change in (lambda m: None, CHANGES[name]):
        for one in (m, plain):
            torch.manual_seed(3)
            change(one)
        before = vitrify.counters["compiled_calls"]
        same([m(X), m(X)], [plain(X)] * 2)
        assert vitrify.counters["compiled_calls"] == before + 2


# ---- classes that do things their own way

class OwnCall(nn.Module):
    def __call__(self, x):
        return super().__call__(x) + 1

    def forward(self, x):
        return x * 2


class OwnGetattr(Net):
    def __getattr__(self, name):
        return 3.0 if name == "k" else super().__getattr__(name)

    def forward(self, x):
        return super().forward(x) * self.k


class OwnSetattr(Net):
    def __setattr__(self, name, value):
        super().__setattr__(name, value * 2 if name == "k" else value)

    def forward(self, x):
        return super().forward(x) * self.k


class WithProperty(Net):
    _k = 2.0

    @property
    def k(self):
        return self._k

    @k.setter
    def k(self, v):
        self._k = v + 1

    def forward(self, x):
        return super().forward(x) * self.k


class WithClassState(Net):
    scale = 2.0

    @classmethod
    def scaled(cls, x):
        return x * cls.scale

    @staticmethod
    def shifted(x):
        return x + 1

    def forward(self, x):
        return self.shifted(self.scaled(super().forward(x))) * type(self).scale * self.__class__.scale


class Extra(Net):
    def __init__(self):
        super().__init__()
        self.extra = 4

    def get_extra_state(self):
        return {"extra": self.extra}

    def set_extra_state(self, s):
        self.extra = s["extra"]

    def forward(self, x):
        return super().forward(x) * self.extra


class Late(nn.Module):
    """Makes its parameter at the first call."""

    def forward(self, x):
        if not hasattr(self, "w"):
            self.w = nn.Parameter(torch.ones(x.shape[-1]))
        return x * self.w


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.named = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)]), nn.ModuleDict({"a": nn.Tanh()})
        self.scales, self.by_name = nn.ParameterList([torch.ones(3), torch.zeros(3)]), nn.ParameterDict({"s": torch.full((3,), 2.0)})
        self.register_buffer("hidden", torch.ones(3), persistent=False)

    def forward(self, x):
        for layer, scale in zip(self.layers, self.scales):
            x = self.named["a"](layer(x)) * scale + self.by_name["s"] * self.hidden
        return x


@pytest.mark.parametrize("cls", [OwnCall, OwnGetattr, OwnSetattr, WithProperty, WithClassState, Extra, Lists])
def test_classes(cls):
    m = cls()
    t = vitrify.compile(m)
    if cls is OwnSetattr:
        t.k = 1.5
        assert m.k == 3.0
    agree(t, m)
    if cls is OwnSetattr or cls is WithProperty:
        t.k = 5.0
        agree(t, m)
        m.k = 6.0
        agree(t, m)
    if cls is WithClassState:
        cls.scale = 3.0
        agree(t, m)
        t.scale = 7.0
        assert m.scale == 7.0
        agree(t, m)
    if cls is Extra:
        t.load_state_dict({**m.state_dict(), "_extra_state": {"extra": 9}})
        assert m.extra == 9
        agree(t, m)
    if cls is Lists:
        t.layers.append(nn.Linear(3, 3))
        m.scales.append(torch.full((3,), 5.0))
        agree(t, m)
        m.named["a"] = nn.ReLU()
        agree(t, m)
        t.by_name["s"] = torch.zeros(3)
        agree(t, m)
    p = pickle.loads(pickle.dumps(t))
    assert type(p) is cls
    same(p(X), m(X))


@pytest.mark.eager("as caches do at first: self.w")
@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
def test_parameters_made_at_the_first_call():
    m = Late()
    t = vitrify.compile(m)
    for _ in range(3):
        same(t(X), X)
    assert list(m.state_dict()) == ["w"] and vitrify.counters["compiled_calls"] >= 1
    agree(t, m)


# ---- twins among modules

def test_twins_inside_a_compiled_module():
    inner = vitrify.compile(Net())
    outer = nn.Sequential(inner, nn.Linear(4, 3), vitrify.compile(nn.ReLU()))
    t = vitrify.compile(outer)
    agree(t, outer)
    assert list(t.state_dict()) == ["0.b", "0.l.weight", "0.l.bias", "1.weight", "1.bias"]
    inner.l.weight.zero_()
    agree(t, outer)
    inner.l = nn.Linear(3, 4)
    agree(t, outer)


def test_twin_of_a_twin_shares_the_original():
    m = Net()
    a = vitrify.compile(m)
    b = vitrify.compile(a, mode="max-autotune")
    assert a.__dict__ is b.__dict__ is m.__dict__
    agree(a, m)
    agree(b, m)


def test_one_child_in_two_places():
    shared = nn.Linear(3, 3)
    m = nn.Sequential(shared, nn.Tanh(), shared)
    t = vitrify.compile(m)
    agree(t, m)
    t[0].weight = nn.Parameter(torch.eye(3))
    agree(t, m)
    assert m[2].weight is t[0].weight and len(list(t.parameters())) == 2


def test_containers_are_used_through_the_twin():
    m = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    t = vitrify.compile(m)
    agree(t, m)
    assert len(t) == 2 and t[0] is m[0] and list(t) == list(m) and t[-1] is m[1]
    t.append(nn.Linear(3, 2))
    t.insert(0, nn.Tanh())
    assert len(m) == 4
    agree(t, m)
    del t[0]
    m[0] = nn.Linear(3, 3)
    agree(t, m)
    part = t[:1]
    assert part.__class__ is nn.Sequential
    same(part(X), m[0](X))


def test_deepcopy_keeps_what_is_shared():
    m = Net()
    holder = copy.deepcopy({"t": vitrify.compile(m), "m": m, "w": m.l.weight})
    assert holder["t"].l is holder["m"].l and holder["t"].l.weight is holder["w"] and holder["w"] is not m.l.weight
    agree(holder["t"], holder["m"])
    holder["m"].l.weight.zero_()
    agree(holder["t"], holder["m"])


def test_state_moves_between_twin_and_plain_module():
    a, b = Net(), Net()
    t = vitrify.compile(a)
    file = io.BytesIO()
    torch.save(t.state_dict(), file)
    file.seek(0)
    assert b.load_state_dict(torch.load(file)).missing_keys == []
    same(b(X), t(X))
    t.load_state_dict(Net().state_dict())
    agree(t, a)


@pytest.mark.no_kernels("nothing is compiled")
def test_names_and_texts():
    m = Net()
    t = vitrify.compile(m)
    assert repr(t) == repr(m) and set(dir(t)) >= set(dir(m)) and vars(t) is vars(m) and t._get_name() == "Net"
    assert [n for n, _ in t.named_children()] == ["l"] and t.get_submodule("l") is m.l and t.get_parameter("l.weight") is m.l.weight
    assert isinstance(t, nn.Module) and callable(t) and hash(t) != hash(m) and t == t
    match t:
        case Net(b=buffer):
            assert buffer is m.b
        case _:
            raise AssertionError("a twin is an instance of its class")


@pytest.mark.eager("the call is inside a torch.func transform", "torch.jit.trace is running")
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
def test_wrappers_of_modules():
    m = Net()
    t = vitrify.compile(m)
    same(nn.DataParallel(copy.deepcopy(t))(X).cpu(), m(X))  # where there is a GPU it moves what it wraps there
    params = {k: v + 1 for k, v in m.named_parameters()}
    same(torch.func.functional_call(t, params, (X,)), torch.func.functional_call(m, params, (X,)))
    agree(t, m)
    same(torch.vmap(t)(X), torch.vmap(m)(X))
    stacked, buffers = torch.func.stack_module_state([t, copy.deepcopy(t)])
    assert stacked["l.weight"].shape == (2, 4, 3) and buffers["b"].shape == (2, 4)
    same(torch.jit.trace(t, X)(X), m(X))


def test_threads_share_a_twin():
    m = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval()
    t = vitrify.compile(m)
    want, wrong = m(X), []

    @torch.no_grad()
    def work():
        for _ in range(50):
            if not torch.allclose(t(X), want):
                wrong.append(1)

    agree(t, m)
    threads = [threading.Thread(target=work) for _ in range(4)]
    [th.start() for th in threads]
    [th.join() for th in threads]
    assert not wrong


def test_a_language_model_generates_through_its_twin(delta):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=32, bos_token_id=0, eos_token_id=39, use_cache=False)
    m = transformers.GPT2LMHeadModel(config).eval()
    t, ids = vitrify.compile(m), torch.tensor([[1, 2, 3]])
    kw = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, use_cache=False)
    assert torch.equal(t.generate(ids, **kw), m.generate(ids, **kw))
    t.resize_token_embeddings(48)
    assert m.config.vocab_size == 48 and m.lm_head.weight is t.transformer.wte.weight and m.lm_head.weight.shape[0] == 48
    want = m(ids).logits
    for _ in range(2):
        torch.testing.assert_close(t(ids).logits, want, **bounds.SUMS)
    assert delta.compiled_calls >= 2 and delta.kernels_launched > 0
