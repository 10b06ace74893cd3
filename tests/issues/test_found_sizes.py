"""Sizes that the run finds: kernels whose memory depends on one run after the call that finds it."""
import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify
from beside import check, run, same_call
from torch.utils.checkpoint import checkpoint

CASES = {
    "cat of what is found and the rest": (lambda x: torch.cat([x[x > 0], x.reshape(-1)]), lambda: [torch.arange(-20, 20, dtype=torch.int32).view(5, 8)]),
    "cat before it": (lambda x: torch.cat([x.reshape(-1) * 2, x[x > 0], x.reshape(-1) + 1]), lambda: [torch.arange(-20.0, 20.0).view(5, 8)]),
    "pad of it": (lambda x: torch.cat([torch.nn.functional.pad(x[x > 0], (1, 2)), x.reshape(-1)]), lambda: [torch.arange(-20.0, 20.0).view(5, 8)]),
}


@pytest.mark.parametrize("name", CASES)
def test_memory_of_a_found_size(name):
    check(*CASES[name])


def test_one_element_joined_with_a_number():
    def f(x):
        v = x.reshape(-1)[(x.reshape(-1) > 0).nonzero().squeeze(1)]
        w = torch.broadcast_to(v, (2, *v.shape))
        return torch.hstack([x, w[w > 2]])
    check(f, lambda: [torch.tensor(5)])


@pytest.mark.eager("a value that the program reads is another", some=True)
def test_tensor_split_at_places_that_a_tensor_holds():
    """ATen reads its memory, which a placeholder has none of: the whole program ran eagerly. One plan for each of what the places hold."""
    def f(x, places):
        return [part * 2 for part in x.tensor_split(places)]
    compiled = vitrify.compile(f)
    x = torch.arange(21.0).view(7, 3)
    for places in ([2, 5], [1, 3], [2, 5], [-2, 9], [], 3, 2, 3):
        got, want = compiled(x, torch.tensor(places, dtype=torch.int64)), f(x, torch.tensor(places, dtype=torch.int64))
        assert len(got) == len(want) and all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, want)), places
    check(lambda x, n: [part + 1 for part in x.tensor_split(n.cumsum(0))], lambda: [x.clone(), torch.tensor([2, 2])])
    for places in (torch.tensor([2.5]), torch.tensor(0), torch.tensor([[1]])):
        with pytest.raises(RuntimeError) as eager:
            f(x, places)
        with pytest.raises(RuntimeError) as ours:
            compiled(x, places)
        assert str(ours.value) == str(eager.value)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("f", [lambda x: torch.var_mean(x[x > 99], 0), lambda x: torch.std_mean((x[x > 99] * 2).reshape(-1, 1), 0), lambda x: x[x > 99].var(0), lambda x: x[x > 99].sum(0)], ids=["var_mean", "std_mean", "var", "sum"])
def test_statistics_of_as_many_as_are_found(f):
    """The last element was looked at where there was none: the process died."""
    check(lambda x: (x + 1, f(x)), lambda: [torch.arange(33.0).view(33, 1)])
    check(lambda x: (x + 1, f(x)), lambda: [torch.arange(133.0).view(133, 1)])
    check(lambda x: (x + 1, f(x)), lambda: [torch.arange(200.0).view(200, 1)[:, :1].div(2.0)])


OUTS = {
    "sum": lambda x, o: torch.sum(x, (0,), out=o), "amax": lambda x, o: torch.amax(x, (0,), out=o), "cat": lambda x, o: torch.cat([x, x * 2], out=o), "add": lambda x, o: torch.add(x, 1, out=o), "sigmoid": lambda x, o: torch.sigmoid(x, out=o),
}


@pytest.mark.parametrize("name", OUTS)
@pytest.mark.parametrize("size", [0, (2, 0)], ids=str)
def test_empty_out_arguments_take_the_size_of_the_result(name, size):
    def f(x):
        o = torch.empty(size)
        r = OUTS[name](x, o)
        o.mul_(2)
        return r is o, r + 1, o, o.view(-1)[1:], o.shape
    check(f, lambda: [torch.arange(12.0).view(3, 4)])


@pytest.mark.parametrize("first", [None, 12])
def test_chunks_of_nothing(first):
    """Sizes of parts were divided by before the guard that says they are not zero."""
    def f(x):
        return x[x > 9].chunk(2, -1)[0] + 1
    compiled = vitrify.compile(f)
    for n in (first, 0, 5, 0):
        if n is not None:
            x = torch.arange(7.0) if n == 0 else torch.full((n,), 10.0)
            assert torch.equal(compiled(x), f(x))


@pytest.mark.eager("size that follows from content", some=True)
@pytest.mark.parametrize("shown", [False, True], ids=["unused", "returned"])
@pytest.mark.parametrize("grad", [False, True], ids=["no grad", "grad"])
def test_draws_of_as_many_as_random_numbers_leave(grad, shown):
    """Nobody knows the size while the program is captured; a guess of it became the size of what was drawn."""
    def fn(x):
        coins = (torch.rand_like(x) * 4).floor()
        few = torch.unique(coins)
        drawn = torch.randint(0, 9, few.shape)
        more = torch.rand(3, few.shape[-1])
        return (x.sin(), drawn, more) if shown else x.sin()
    compiled = vitrify.compile(fn, dynamic=True)
    for n in (4, 9, 4, 30):
        seen = []
        for f in (fn, compiled):
            torch.manual_seed(n)
            out = f(torch.linspace(0, 1, n, requires_grad=grad))
            seen.append([out, torch.rand(2)])
        torch.testing.assert_close(*seen)


def until_one_is_left(s):
    while s.shape[0] > 1:
        s = s[s > s.mean()]
    return s.sum()


def breadth_first(near):
    front = torch.tensor([0])
    seen = torch.zeros(near.shape[0], dtype=torch.bool)
    seen[front] = True
    while front.numel() > 0:
        new = near[front].any(0) & ~seen
        seen = seen | new
        front = new.nonzero()[:, 0]
    return seen * 1


LOOPS = {
    "until one is left": (until_one_is_left, lambda n: [torch.arange(float(n)) ** 2]),
    "breadth first": (breadth_first, lambda n: [torch.eye(6, dtype=torch.bool).roll(n % 4, 1)]),
}


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_loops_that_content_ends(name, changes):
    """A capture that takes what is found for two elements or more would go round for ever: it is made again with what there is."""
    f, make = LOOPS[name]
    compiled = vitrify.compile(f)
    for i in range(6):
        given = make(9 + (i % 3) * 8 * changes)
        torch.testing.assert_close(compiled(*given), f(*given))
    assert changes or vitrify.counters["eager_calls"] == 0


FILTERED = {"rows": lambda b: b[b[:, 0] > 5][1:][:, 0] * 2, "indices": lambda b: b.nonzero()[1:][:, 0] * 2, "columns": lambda b: b[b[:, 0] > 5][2:][:, 1:] + 1}


@pytest.mark.parametrize("name", FILTERED)
def test_a_slice_of_a_slice(name):
    check(FILTERED[name], lambda: [torch.arange(36.0).view(9, 4)])


RAISING = {
    "repeat_interleave": lambda x, n: torch.repeat_interleave(x, n), "bincount": lambda x, n: n.bincount() + x.sum(), "one_hot": lambda x, n: F.one_hot(n) + x.sum(),
    "ctc_loss": lambda x, n: F.ctc_loss(x.view(4, 1, 1).expand(4, 1, 3).log_softmax(-1), torch.tensor([[1, 2]]), n[:1].abs() + 3, torch.tensor([2])),
    "a number of what raises": lambda x, n: x * (torch.repeat_interleave(x, n).sum() > 1).item(),
}


@pytest.mark.parametrize("first", [-1, 1])
@pytest.mark.parametrize("name", RAISING)
def test_errors_of_what_is_run_to_find_sizes(name, first):
    """A program that catches one in its first call took the same way in all later ones."""
    expects.eager("raises by what its operands hold", "size that follows from content", "a value that the program reads is another", "a compiled call raised what eager does not", some=True)

    def program(x, n):
        try:
            y = RAISING[name](x, n)
        except RuntimeError:
            y = x - 5
        return y * 2
    compiled = vitrify.compile(program)
    for least in (first, 1, -1, 1):
        given = torch.arange(4.0), torch.tensor([least, 1, 2, 0])
        assert torch.equal(compiled(*given), program(*given))


@torch.library.custom_op("vt_found::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].clone()


@positive.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


PUT = {
    "the last part": lambda x, v: x.index_put_((torch.tensor([1]),), torch.split(v, 2, -1)[-1], accumulate=True),
    "all": lambda x, v: x.view(-1).index_put_((torch.arange(3),), v, accumulate=True),
    "what is left": lambda x, v: x.view(-1).index_put_((torch.arange(2),), v[1:], accumulate=True),
    "of whole dims": lambda x, v: torch.ops.aten.index_put_(x, (None, torch.tensor([0, 1])), v.view(-1, 1, 1), True),
}


@pytest.mark.filterwarnings("ignore:vitrify")
@pytest.mark.judged("most sizes are errors of eager's")
@pytest.mark.parametrize("custom", [False, True], ids=["mask", "custom op"])
@pytest.mark.parametrize("name", PUT)
def test_as_many_values_as_are_found_are_written(name, custom):
    """One value goes to all places; a kernel read as many as there are places, past the end."""
    def f(x, y):
        return PUT[name](x, positive(y) if custom else y[y > 0] + 1)
    compiled = vitrify.compile(f)
    fit = 0
    for n in (1, 3, 11, 1, 2, 12, 0, 3, 1):
        y = torch.cat([torch.arange(1.0, n + 1), torch.full((12 - n,), -1.0)])
        a, b = [torch.ones(4, 2, 3), y], [torch.ones(4, 2, 3), y]
        ours, eager = run(compiled, a), run(f, b)
        same_call(ours, eager, a, b)
        fit += eager[1] is None
    assert fit


PARTS = {
    "the last of all": lambda x: ((v := x[x > 0] * 2), v[None, ..., -1] / 3),
    "sums of it": lambda x: ((v := x[x > 0].sin()), v.sum(), v.cumsum(0)[-1]),
    "of two sizes": lambda x: ((v := x[x > 0]) * 2, v[-1] * 3, (w := x[x > 1])[-1] * 2, w.sin(), torch.cat([v, w])[-1]),
}


@pytest.mark.parametrize("name", PARTS)
def test_gradients_of_one_result_of_several(name):
    """The size was read from the other's gradient, which does not come with that of this."""
    f = PARTS[name]
    compiled = vitrify.compile(f)
    for values in ([1.0, -2, 3, 4, 2], [1.0, 2, -3, 3, 4], [1.0, -2, -3, 2, 5]):
        num = len(f(torch.tensor(values)))
        for which in [[i] for i in range(num)] + [list(range(num)), list(range(1, num))]:
            grads = []
            for g in (f, compiled):
                x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
                out = g(x)
                sum(out[i].sum() * (i + 1) for i in which).backward()
                grads.append(x.grad)
            assert torch.equal(*grads), (values, which, grads)


def test_a_hook_on_one_of_two_results():
    """The parts of the derivative run one by one, each without what comes to the others."""
    def f(x):
        v = x[x.isfinite()] * 2
        return v, v[None, ..., -1] / 3
    grads = []
    for g in (f, vitrify.compile(f)):
        x = torch.tensor([1.0, 2, 3, 4, 5], requires_grad=True)
        a, b = g(x)
        a.register_hook(lambda g: g + 1)
        (a.sum() + b.sum()).backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


OF_TWO = {
    "found first": lambda x, w: ((x * w)[x > 0].sin(), (x * w).exp()),
    "found last": lambda x, w: ((x * w).exp(), (x * w)[x > 0].sin()),
    "found in both": lambda x, w: ((x * w)[x > 0].sin(), (x * w)[x < 0].exp()),
    "found by positions": lambda x, w: ((x * w)[(x > 0).nonzero()[:, 0]].sin() * 2, (x * w).exp()),
    "found behind": lambda x, w: (lambda h: (h[h > 0].sin(), h))((x * w).sin()),
    "decided by what was found": lambda x, w: (lambda y: (y.sin(), (x * w).exp() if y.shape[0] > 2 else x * w))((x * w)[x > 0]),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "in a checkpoint"])
@pytest.mark.parametrize("name", OF_TWO)
def test_one_of_two_results(name, again, dynamic, order):
    """What was found has its size from a gradient that does not come, and is found once more where a checkpoint computes again: the backward raised."""
    def f(x, w):
        return checkpoint(OF_TWO[name], x, w, use_reentrant=False) if again else OF_TWO[name](x, w)
    compiled = vitrify.compile(f, dynamic=dynamic)
    for which in (1, 0, None):
        for values in ([-1.5, -.5, .5, 1.5], [1.5, -.5, .5, 1.0], [1.5, -.5, .5, 1.0, 2.0, 3.0]):
            grads = []
            for g in (f, compiled):
                x, w = torch.tensor(values, dtype=torch.float64, requires_grad=True), torch.arange(1.0, 1 + len(values), dtype=torch.float64).requires_grad_()
                out = g(x * 1, w)
                loss = sum(t.sin().sum() for k, t in enumerate(out) if which in (None, k))
                if order == 2:
                    loss = sum(t.square().sum() for t in torch.autograd.grad(loss, [x, w], create_graph=True))
                loss.backward()
                grads.append(torch.cat([x.grad, w.grad]))
            torch.testing.assert_close(grads[1], grads[0])
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["eager_calls"] == 0
