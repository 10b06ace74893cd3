"""Objects of the program's own classes in a result: made again by every call where the program makes them, and eager's own everywhere else."""
import copy
import dataclasses
import warnings
import weakref

import pytest
import torch
import vitrify
from helpers import same


class Box:
    def __init__(self, x, n=3):
        self.x, self.n, self.more = x, n, [x + 1, {"deep": x - 1}]


class Base:
    def __init__(self, x):
        self.x = x


class Slots(Base):
    __slots__ = ("y",)


class New(Base):
    def __new__(cls, x):
        return super().__new__(cls)


class Dies(Base):
    def __del__(self):
        pass


class Known(Base):
    all = weakref.WeakSet()

    def __init__(self, x):
        super().__init__(x)
        Known.all.add(self)


class Values(dict):
    pass


@dataclasses.dataclass
class Config:
    scale: float


def contents(o):
    if isinstance(o, (list, tuple)):
        return type(o)(contents(v) for v in o)
    if type(o) is dict:
        return {k: contents(v) for k, v in o.items()}
    return [type(o).__qualname__, contents(vars(o))] if type(o).__module__ == __name__ else o


def in_a_cycle(x):
    box = Box(x * 2)

    def countdown(n):
        return n and countdown(n - 1)
    return box, countdown(2)


def distribution(x):
    return torch.distributions.Normal(x * 2, x.exp(), validate_args=False)


@pytest.mark.parametrize("fn", [lambda x: Box(x * 2), lambda x: {"a": [Box(x * 2), (Box(x, 1),)]}, in_a_cycle], ids=["one", "nested", "frame_in_a_cycle"])
def test_made_by_the_program(fn, delta, no_warnings):
    compiled = vitrify.compile(fn)
    for i in range(1, 4):
        ours, eager = (torch.full((3,), float(i), requires_grad=True) for _ in range(2))
        a, b = compiled(ours), fn(eager)
        same(contents(a), contents(b))
        first = lambda o: o if isinstance(o, Box) else first(o["a"][0] if isinstance(o, dict) else o[0])  # noqa: E731
        for box, leaf in ((first(a), ours), (first(b), eager)):
            (box.x * box.more[0]).sum().backward()
        same(ours.grad, eager.grad)
        assert first(a).x.requires_grad and first(a) is not first(compiled(ours.detach().requires_grad_()))
        first(a).more.append(1)  # nobody else's
    assert delta.captures == 1 and delta.eager_calls == 0 and delta.kernels_launched > 0


def test_a_distribution(delta, no_warnings):
    compiled, x = vitrify.compile(distribution), torch.randn(4)
    for _ in range(2):
        a, b = compiled(x), distribution(x)
        assert type(a) is type(b)
        same(a.log_prob(torch.ones(4)), b.log_prob(torch.ones(4)))
    assert delta.compiled_calls == 2


KEPT, OLD, CONFIG = {}, Box(torch.ones(3)), Config(2.0)


def kept(x):
    KEPT["box"] = box = Box(x * 2)
    return box


def given_twice(x):
    box = Box(x * 2)
    return box, [box]


def a_list_twice(x):
    items = [x * 2]
    return items, (items,)


def shares_a_list(x):
    box = Box(x * 2)
    box.again = box.more
    return box


def holds_itself(x):
    box = Box(x * 2)
    box.me = box
    return box


def a_dict_of_its_own(x):
    values = Values()
    values.box = Box(x)
    return values


def slots(x):
    made = Slots(x * 2)
    made.y = 1
    return made


REFUSED = [kept, given_twice, a_list_twice, shares_a_list, holds_itself, a_dict_of_its_own, slots,
           lambda x: New(x * 2), lambda x: Dies(x * 2), lambda x: Known(x * 2), lambda x: torch.nn.Linear(3, 3)]


@pytest.mark.eager("the result holds an object of type", "the result is an object of type", some=True)
@pytest.mark.parametrize("fn", REFUSED, ids=lambda f: f.__name__)
def test_identity_is_kept(fn, delta):
    """Eager's result: objects that were there before, that are kept, or that are in the result twice."""
    x = torch.ones(3)
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        compiled = vitrify.compile(fn)
        out = [compiled(x) for _ in range(3)][-1]
    assert len(log) == 1 and delta.compiled_calls == 0
    if fn is kept:
        assert out is KEPT["box"] and type(out.x) is torch.Tensor and torch.equal(out.x, x * 2)
    elif fn is given_twice:
        assert out[0] is out[1][0]
    elif fn is a_list_twice:
        assert out[0] is out[1][0]
    elif fn is shares_a_list:
        assert out.more is out.again
    elif type(out) is Known:
        assert out in Known.all


def test_what_was_there_comes_back_itself(delta, no_warnings):
    box = Box(torch.ones(3))
    for fn, args, known in ((lambda x, b: (b, x * 2), [box], box), (lambda x: (OLD, x * 2), [], OLD), (lambda x: (CONFIG, x * CONFIG.scale), [], CONFIG)):
        compiled = vitrify.compile(fn)
        for _ in range(3):
            assert compiled(torch.ones(3), *args)[0] is known
    assert delta.eager_calls == 0


@pytest.mark.network
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral"])
def test_a_cache_of_keys_and_values(name, train, delta):
    """transformers' default: use_cache, which gives a DynamicCache."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(n_layer=2, n_embd=32, n_head=4) if name == "GPT2" else dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64)
    sizes.update(dict(sliding_window=8) if name == "Mistral" else {})
    config = getattr(transformers, f"{name}Config")(vocab_size=100, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes)
    model = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(config).eval()
    wide, ids = copy.deepcopy(model).double(), torch.randint(3, 100, (2, 12))
    assert config.use_cache
    compiled = vitrify.compile(model)
    with warnings.catch_warnings(), torch.set_grad_enabled(train):
        warnings.simplefilter("error", vitrify.VitrifyWarning)
        ours = [compiled(ids, labels=ids) for _ in range(2)][-1]
        assert delta.captures == 1 and delta.compiled_calls == 2 and delta.eager_calls == 0
        eager, exact = model(ids, labels=ids), wide(ids, labels=ids)

    def near(a, e, r):
        assert a.dtype == e.dtype and a.shape == e.shape and a.stride() == e.stride() and a.requires_grad == e.requires_grad
        mine, theirs = ((t.double() - r).abs().max() for t in (a, e))
        assert mine <= 2 * theirs + 4 * torch.finfo(torch.float32).eps * r.abs().max()
    caches = [o.past_key_values for o in (ours, eager, exact)]
    assert type(caches[0]) is type(caches[1]) and caches[0].get_seq_length() == caches[1].get_seq_length() == 12
    for layers in zip(*(c.layers for c in caches), strict=True):
        assert len({type(v) for v in layers}) == 1 and vars(layers[0]).keys() == vars(layers[1]).keys()
        near(*(v.keys for v in layers))
        near(*(v.values for v in layers))
    near(*(o.logits for o in (ours, eager, exact)))
    if train:
        for o in (ours, exact):  # also through the cache
            (o.loss + o.past_key_values.layers[0].keys.square().sum()).backward()
        mine = {n: p.grad for n, p in model.named_parameters()}
        model.zero_grad()
        (eager.loss + eager.past_key_values.layers[0].keys.square().sum()).backward()
        for (n, p), w in zip(model.named_parameters(), wide.parameters()):
            near(mine[n], p.grad, w.grad)
    else:  # and what is made of it: the next token, by the cache that came back
        with torch.no_grad():
            after = [f(ids[:, :1], past_key_values=c).logits for f, c in ((model, caches[0]), (model, caches[1]), (wide, caches[2]))]
        near(*after)
