"""What an error leaves behind: writes made before it, versions, generators and gradients are as eager leaves them, on the first call and on any later one."""
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import compare  # noqa: E402

BAD = torch.tensor([0, 99])
# Each raises where `bad` says so, and not for a Meta tensor.
FAILING = {
    "multinomial": lambda x, i: torch.multinomial(x[0].abs() - 999.0 * (i.max() > 3), 2),
    "scatter": lambda x, i: x.scatter(0, i.expand(1, 2), 1.0),
    "scatter_": lambda x, i: x.clone().scatter_(1, i.view(1, 2), x),
    "scatter_add": lambda x, i: x.scatter_add(1, i.view(1, 2), x),
    "scatter_reduce": lambda x, i: x.scatter_reduce(1, i.view(1, 2), x, "amax"),
    "gather": lambda x, i: x.gather(1, i.view(1, 2)),
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding_bag": lambda x, i: F.embedding_bag(i.view(1, 2), x),
    "index": lambda x, i: x[i],
    "index_put": lambda x, i: x.clone().index_put_((i,), torch.ones(())),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_add": lambda x, i: x.index_add(0, i, x[:2]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[:2]),
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
    "take": lambda x, i: x.take(i),
    "nll_loss": lambda x, i: F.nll_loss(x[:2], i),
    "cross_entropy": lambda x, i: F.cross_entropy(x[:2], i),
    "bernoulli": lambda x, i: torch.bernoulli(x.abs().clamp(max=1) + (i.max() > 3)),
    "normal": lambda x, i: torch.normal(x, 1.0 - 3.0 * (i.max() > 3).float().expand(x.shape)),
    "poisson": lambda x, i: torch.poisson(x.abs() - 9.0 * (i.max() > 3)),
    "division": lambda x, i: i // (99 - i),
    "remainder": lambda x, i: i % (99 - i),
    "max_unpool": lambda x, i: F.max_unpool2d(torch.ones(1, 1, 1, 2), i.view(1, 1, 1, 2), 2),
    "cholesky": lambda x, i: torch.linalg.cholesky(torch.eye(2) - 3.0 * (i.max() > 3)),
}
MAKES = {
    "add_": lambda x, y: x.add_(1), "two writes": lambda x, y: (x.add_(1), y.mul_(2), x.mul_(3)), "a view": lambda x, y: x[:, 1:].mul_(2), "draws": lambda x, y: torch.rand(3), "draws into": lambda x, y: y.normal_(),
    "both": lambda x, y: (x.add_(torch.rand_like(x)), y.copy_(x), torch.randn(20)), "metadata": lambda x, y: (y.t_(), y.add_(1)), "nothing": lambda x, y: None,
}


def run(f, index, grad):
    torch.manual_seed(4)
    x, y = torch.arange(1.0, 13.0).reshape(3, 4), torch.ones(3, 4)
    w = torch.ones(3, 4, requires_grad=grad)
    before, error, out = (x._version, y._version), None, None
    try:
        out = f(x, y, w, index)
    except Exception as e:
        error = type(e), str(e).partition("\n")[0]
    return out, error, (x, y), (x._version - before[0], y._version - before[1]), torch.get_rng_state(), w.grad


@pytest.mark.sweep(5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("makes", MAKES)
@pytest.mark.parametrize("fails", FAILING)
def test_state_after_an_error(fails, makes, grad):
    fail, make = FAILING[fails], MAKES[makes]

    def f(x, y, w, index):
        z = x * 2
        make(x, y)
        bad = fail(z, index)
        y.add_(5)
        torch.rand(2)
        return bad, x + 1 + w, y * 2
    compiled = vitrify.compile(f)
    good = torch.tensor([0, 1])
    with torch.set_grad_enabled(grad):
        for index in (BAD, good, BAD, good):
            a, b = run(compiled, index, grad), run(f, index, grad)
            assert a[1] == b[1] and (index is good or b[1] is not None)
            for (where, p), (_, q) in zip(compare.flat((a[0], a[2])), compare.flat((b[0], b[2]))):
                if isinstance(q, torch.Tensor):
                    compare.check_meta(where, p, q)
                    torch.testing.assert_close(p, q)
            assert a[3] == b[3] and torch.equal(a[4], b[4])


@pytest.mark.parametrize("fails", ["multinomial", "scatter", "embedding_bag", "index", "division"])
def test_it_ran_compiled(fails):
    """A call that fails is eager's; those before and after it are not."""
    fail = FAILING[fails]
    f = vitrify.compile(lambda x, i: (x.add_(1), fail(x * 2, i))[1])
    x, good = torch.ones(3, 4), torch.tensor([0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in (good, BAD, good, BAD, good):
            before = dict(vitrify.counters)
            if index is BAD:
                with pytest.raises((RuntimeError, IndexError)):
                    f(x, index)
            else:
                f(x, index)
                assert vitrify.counters["compiled_calls"] == before["compiled_calls"] + 1
    assert x[0, 0] == 6 and vitrify.counters["fallbacks"] == 0


def test_explicit_generators():
    g = torch.Generator()
    f = lambda x, i: (torch.rand(3, generator=g), x.normal_(generator=g), torch.rand(2), x[i])  # noqa: E731

    def state(f, index):
        torch.manual_seed(1)
        g.manual_seed(2)
        x = torch.zeros(3, 7)
        try:
            f(x, index)
        except IndexError:
            pass
        return x, g.get_state(), torch.get_rng_state()
    compiled = vitrify.compile(f)
    for index in (torch.tensor([0, 1]), BAD, BAD, torch.tensor([1, 1])):
        for a, b in zip(state(compiled, index), state(f, index)):
            assert torch.equal(a, b)


def test_an_op_with_effects_runs_once():
    """Nobody may run it again: its error, and one after it, comes as it is."""
    calls = []

    @torch.library.custom_op("state_after_errors::note", mutates_args=())
    def note(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if x.sum() < 0:
            raise ValueError("negative")
        return x.clone()

    note.register_fake(lambda x: torch.empty_like(x))
    f = vitrify.compile(lambda x, i: note(x * 2)[i])
    x = torch.ones(3)
    for index, error in ((torch.tensor([0]), None), (BAD, IndexError), (torch.tensor([0]), None)):
        calls.clear()
        if error:
            with pytest.raises(error):
                f(x, index)
        else:
            f(x, index)
        assert len(calls) == 1
    calls.clear()
    with pytest.raises(ValueError, match="negative"):
        f(-x, torch.tensor([0]))
    assert len(calls) == 1


def test_no_memory_for_a_result_between_launches():
    """An error, as eagerly (in other words), and the next call works."""
    def f(x, n):
        total = (x * 2).sum()
        return x * 3, (total + x[0, 0]).expand(n, 2**20).clone()
    x = torch.randn(1024, 1024)
    compiled = vitrify.compile(f, dynamic=False)
    compiled(x, 2)
    for call in (f, compiled):
        with pytest.raises(RuntimeError, match="can't allocate memory|bad_alloc"):
            call(x, 2**27)
    for a, b in zip(compiled(x, 2), f(x, 2)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("index, rows", [(1, 0), (2, 1), (1, 2)], ids=str)
@pytest.mark.no_kernels("the program raises while it is captured")
def test_an_index_add_of_other_sizes_raises_though_nobody_reads_it(index, rows):
    """Its shape rule asked for the sizes of the first operand only."""
    def f(x, source):
        x.add_(1)
        torch.zeros_like(x).index_add(0, torch.zeros(index, dtype=torch.long), source)
        return x * 2
    for _ in range(2):
        told = []
        for run in (f, vitrify.compile(f)):
            x = torch.zeros(3, 2)
            with pytest.raises((RuntimeError, IndexError)) as e:
                run(x, torch.ones(rows, 2))
            told.append((type(e.value), str(e.value).partition("\n")[0], x.tolist(), x._version))
        assert told[0] == told[1]


@pytest.mark.no_kernels("the program raises")
def test_an_error_within_a_checkpoint_leaves_the_hooks_as_they_were(monkeypatch):
    """A checkpoint's generator takes its hooks off the stack when its frame goes: of a capture that was after the stack had been put back."""
    def no(a):
        torch.tanh(a)
        raise ValueError("no")
    ignored, packed = [], []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: ignored.append(what.exc_value))
    compiled, x = vitrify.compile(lambda x: checkpoint(no, x, use_reentrant=False)), torch.randn(3, requires_grad=True)
    for _ in range(2):
        with torch.autograd.graph.saved_tensors_hooks(vitrify.mark_lossless(lambda t: packed.append(t) or t), lambda t: t):
            with pytest.raises(ValueError, match="no"):
                compiled(x)
            packed.clear()
            x.exp()
            assert len(packed) == 1  # the user's own are still there
        packed.clear()
        x.exp().sum().backward()
        assert not packed and not ignored


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("draws", [False, True], ids=["", "draws"])
@pytest.mark.parametrize("fails", ["index", "division", "multinomial", "scatter", "the op", "an op that writes", "nothing"])
def test_writes_before_an_error_after_an_op_with_effects(fails, draws, grad):
    """Eager makes the writes and the draws that the run had not made, without running the op again."""
    calls, name = [], f"state_after_errors::{fails.replace(' ', '_')}_{draws}_{grad}"

    @torch.library.custom_op(name, mutates_args=())
    def note(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if fails == "the op" and x.sum() > 200:
            raise ValueError("too much")
        return x + torch.rand(()) if draws else x.clone()

    @torch.library.custom_op(name + "_into", mutates_args=("x",))
    def into(x: torch.Tensor) -> None:
        calls.append(2)
        x.add_(1)
        if fails == "an op that writes" and x.sum() > 200:
            raise ValueError("too much")

    note.register_fake(lambda x: torch.empty_like(x))

    def f(x, y, w, index):
        x.add_(1 + 99 * (index.max() > 3))
        if draws:
            y.add_(torch.rand(()))
        into(y)
        z = note(x * 2).abs()
        y.mul_(2)
        torch._foreach_mul_([x, y], 0.5)  # whose kernel has each write counted by another op
        into(x)
        bad = FAILING[fails](z, index) if fails in FAILING else z
        y.add_(note(bad.sum().float()))
        return bad, x + 1 + w
    compiled = vitrify.compile(f)
    good = torch.tensor([0, 1])
    with torch.set_grad_enabled(grad):
        for index in (BAD, good, BAD, good):
            calls.clear()
            a, ours = run(compiled, index, grad), calls[:]
            calls.clear()
            b = run(f, index, grad)
            assert a[1] == b[1] and ours == calls and (b[1] is None) == (index is good or fails == "nothing")
            for (where, p), (_, q) in zip(compare.flat((a[0], a[2])), compare.flat((b[0], b[2]))):
                if isinstance(q, torch.Tensor):
                    compare.check_meta(where, p, q)
                    torch.testing.assert_close(p, q)
            assert a[3] == b[3] and torch.equal(a[4], b[4])
