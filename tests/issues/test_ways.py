"""What content decides: a plan for each way that a program goes. Where a custom op has run before it shows, it does not run again."""
import pytest
import torch
import vitrify
from beside import run, same_call

ran = []
Tensor = torch.Tensor


@torch.library.custom_op("vt_ways::noted", mutates_args=())
def noted(x: Tensor) -> Tensor:
    ran.append("noted")
    return x * 2


noted.register_fake(torch.empty_like)


@torch.library.custom_op("vt_ways::above", mutates_args=())
def above(x: Tensor) -> Tensor:
    ran.append("above")
    return x[x > 0].clone()


@above.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.custom_op("vt_ways::halved", mutates_args=("x",))
def halved(x: Tensor) -> Tensor:
    ran.append("halved")
    x.mul_(0.5)
    return x.sum()


@halved.register_fake
def _(x):
    return x.new_empty(())


@torch.library.custom_op("vt_ways::drawn", mutates_args=())
def drawn(x: Tensor) -> Tensor:
    ran.append("drawn")
    return x + torch.rand(x.shape)


drawn.register_fake(torch.empty_like)


@torch.library.custom_op("vt_ways::parts", mutates_args=())
def parts(x: Tensor) -> list[Tensor]:
    ran.append("parts")
    return [x + 1, x * 3]


@parts.register_fake
def _(x):
    return [torch.empty_like(x), torch.empty_like(x)]


def broadcast(v):
    """Guards that there is not just one."""
    return v.expand(2, *v.shape) * torch.ones(2, 1)


PROGRAMS = {
    "a size after an op": lambda x: (noted(x) + 1, broadcast(x[x > 0])),
    "a size of an op": lambda x: (broadcast(above(x)) + 1, x * 2),
    "a size of what an op gave": lambda x: broadcast(noted(x)[noted(x) > 2]),
    "a value after an op": lambda x: noted(x) * 2 if (x > 0).all() else noted(x) - 100,
    "an op that writes": lambda x: (halved(x), broadcast(x[x > 0]), x + 1),
    "an op that draws": lambda x: (torch.rand(2), drawn(x), broadcast(x[x > 0]), torch.rand(2)),
    "ops of several results": lambda x: (parts(x)[1] + parts(x)[0], broadcast(x[x > 0])),
    "no op": lambda x: broadcast(x[x > 0]) + 1 if (x > -5).all() else x * 3,
}
MANY, ONE, NONE = torch.tensor([1.0, -1, 2, 3]), torch.tensor([-1.0, 5, -2, -9]), torch.tensor([-1.0, -7, -2, -3])


def same_as_eager(compiled, fn, x):
    """Also in what the ops of others were called with."""
    a, b = [x.clone()], [x.clone()]
    ran.clear()
    ours, mine = run(compiled, a), list(ran)
    ran.clear()
    same_call(ours, run(fn, b), a, b)
    assert mine == ran


@pytest.mark.parametrize("order", [(0, 1, 2, 0, 1, 2), (2, 0, 1, 1), (1, 0, 0, 2)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_way_is_compiled(name, order):
    fn = PROGRAMS[name]
    compiled = vitrify.compile(fn)
    before = dict(vitrify.counters)
    with torch.no_grad():
        for k in order:
            x = [MANY, ONE, NONE][k]
            same_as_eager(compiled, fn, x)
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    assert did["compiled_calls"] == len(order) and did["eager_calls"] == 0 and did["captures"] <= 4


@pytest.mark.eager("a value that the program reads is another", "a size that follows from content", "recompile_limit is reached", some=True)
@pytest.mark.filterwarnings("ignore:vitrify")
@pytest.mark.parametrize("name", ["a size of an op", "a value after an op", "an op that writes", "an op that draws", "ops of several results"])
def test_eagerly_when_there_are_too_many(name):
    """What ops gave goes to eager too."""
    fn = PROGRAMS[name]
    compiled = vitrify.compile(fn, options={"recompile_limit": 1})
    with torch.no_grad():
        for x in (MANY, NONE, ONE, MANY):
            same_as_eager(compiled, fn, x)


@pytest.mark.eager("a value that the program reads is another")
def test_an_error_on_the_other_way_is_eagers():
    """Bad data leaves the plan of good data alone."""
    def fn(x):
        y = noted(x)
        if not (x > 0).all():
            raise ValueError("not above zero")
        return y + 1
    compiled = vitrify.compile(fn)
    before = dict(vitrify.counters)
    good = torch.ones(3)
    with torch.no_grad():
        for x in (good, -good, good, -good, good):
            ran.clear()
            same_call(run(compiled, [x]), run(fn, [x]), [x], [x])
            assert ran == ["noted"] * 2
    assert vitrify.counters["captures"] - before["captures"] == 1 and vitrify.counters["compiled_calls"] - before["compiled_calls"] == 3


@torch.library.custom_op("vt_ways::both", mutates_args=("x",))
def both(x: Tensor) -> tuple[Tensor, Tensor]:
    ran.append(("both", x.tolist()))
    x.mul_(0.5)
    return x + 1, x.sum()


@both.register_fake
def _(x):
    return torch.empty_like(x), x.new_empty(())


@torch.library.custom_op("vt_ways::seen", mutates_args=())
def seen(x: Tensor) -> Tensor:
    ran.append(("seen", x.tolist()))
    return x * 2


seen.register_fake(torch.empty_like)


def not_empty(x):
    v = both(x)[1].reshape(-1)
    v = v[v > 0]
    w = seen(v)
    return v[v > 99].min(), w


AFTER = {
    "of what an op gave": not_empty,
    "of as many": lambda x: (seen(torch.ones(x[x > 0].numel())), broadcast(x[x > 0])),
    "of a part": lambda x: (seen(x[: x[x > 0].numel()]), broadcast(x[x > 0])),
    "of nothing that is found": lambda x: (x[x > 0].sum(), seen(x), broadcast(x[x > 1])),
    "of a size that an op found": lambda x: (x.sum(), above(x), torch.where(x.sum().reshape(-1)[: above(x).numel()] > 0)[0], broadcast(above(x))),
    "unused, with the rest": lambda x: (both(torch.cat([x[x > 0], x]))[1:0], x[x.isfinite()] * 2)[:0],
    "with the rest": lambda x: (both(torch.cat([x[x > 0], x])), x[x.isfinite()] * 2),
    "other results of it": lambda x: (x + 1, torch.unique(x[x > 0], return_inverse=True)[1] * 2),
}
LARGE = torch.tensor([400.0, -1, -2, -3])


@pytest.mark.eager("a size that follows from content is not what the plan is for", some=True)
@pytest.mark.filterwarnings("ignore:vitrify")
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 0), (3, 0, 2, 1, 3), (2, 1, 0, 3, 2), (1, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("name", AFTER)
def test_sizes_are_found_before_the_ops_behind_them(name, order):
    """Where a guard has fixed a size, nothing that the op is given said that it is found first: the op ran for another size, and what it gave was kept."""
    fn = AFTER[name]
    compiled = vitrify.compile(fn)
    with torch.no_grad():
        for k in order:
            x = [MANY, ONE, NONE, LARGE][k]
            same_as_eager(compiled, fn, x)
