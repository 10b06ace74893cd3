"""Strides of results without elements were not learned from what the op gave: svd of a matrix without rows had V's of a matrix with some."""
import pytest
import torch
import torch.nn.functional as F
import vitrify


@pytest.mark.compiled("there is nothing to compute")
@pytest.mark.eager("recorded ", some=True)
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (2, 0, 3), (0, 0)])
def test_strides_of_empty_results(shape):
    x = torch.zeros(shape)
    compiled, before = vitrify.compile(torch.svd), vitrify.counters["externs_called"]
    for _ in range(2):
        ours, eager = compiled(x), torch.svd(x)
        assert [(t.shape, t.stride()) for t in ours] == [(t.shape, t.stride()) for t in eager]
    assert vitrify.counters["externs_called"] > before


@pytest.mark.parametrize("program, shape", [
    (lambda x: x.prod(1), (3, 0)), (lambda x: x.prod(), (0, 2)), (lambda x: x.prod(0), (2, 0)),
    (lambda x: torch.nn.functional.pad(x, (1, 2), mode="circular"), (0, 3, 3)), (lambda x: x.as_strided((0, 2), (1, 5), 3) + 1, (4,)),
], ids=["prod along none", "prod of none", "prod to none", "circular pad", "as_strided"])
@pytest.mark.compiled("there is nothing to compute")
def test_gradients_of_nothing(program, shape):
    """The derivative narrowed a dim of no elements to -1, and a view of no elements was taken to reach outside its memory."""
    def both(f):
        x = torch.zeros(shape, requires_grad=True)
        y = f(x * 1)
        return y, *torch.autograd.grad(y, x, torch.ones_like(y))
    for _ in range(2):
        for ours, eager in zip(both(vitrify.compile(program)), both(program)):
            assert torch.equal(ours, eager) and ours.stride() == eager.stride()
    assert not vitrify.counters["eager_calls"]


@pytest.mark.compiled("there is nothing to compute")
@pytest.mark.parametrize("of", [torch.tril, torch.triu])
def test_the_other_size_is_found(of):
    """No kernel came to the result, whose memory was made with the first that would have written it: it was None."""
    def fn(x):
        return of(torch.zeros(x.nonzero().shape[0], 0))
    compiled, before = vitrify.compile(fn), vitrify.counters["externs_called"]
    for x in (torch.tensor(1.0), torch.tensor(0.0)):
        ours, eager = compiled(x), fn(x)
        assert (ours.shape, ours.dtype, ours.stride()) == (eager.shape, eager.dtype, eager.stride())
    assert vitrify.counters["externs_called"] > before


@pytest.mark.compiled("there is nothing to compute")
@pytest.mark.parametrize("fn", [lambda x, i: torch.index_select(x, 0, i), lambda x, i: F.embedding(i, x[:, 0])], ids=["index_select", "embedding"])
def test_indices_of_nothing_are_checked(fn):
    x, good, bad = torch.zeros(33, 3, 0), torch.tensor([0, 32]), torch.tensor([0, 120])
    compiled = vitrify.compile(fn)
    assert compiled(x, good).shape == fn(x, good).shape
    errors = []
    for f in (fn, compiled):
        with pytest.raises((IndexError, RuntimeError)) as error:
            f(x, bad)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


@pytest.mark.compiled("there is nothing to compute")
def test_repeats_of_nothing():
    """The range of an index into nothing was empty, which the compiler took for its own fault."""
    def fn(x):
        return torch.repeat_interleave(x, torch.tensor([-1]), 0)

    def tell(f):
        try:
            return f(torch.empty(0, 8, 16)).shape
        except RuntimeError as e:
            return str(e)
    assert tell(vitrify.compile(fn)) == tell(fn)


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_memory_of_no_elements_is_contiguous(dynamic):
    """Whatever its strides: contiguous() gives the tensor itself."""
    r = torch.randn(5)
    f = vitrify.compile(lambda x, r: (x.contiguous(), torch.hstack([x, x]).prod(-1), r + 1), dynamic=dynamic)
    for x in (torch.zeros(3, 0, 33), torch.zeros(16, 0, 7).permute(2, 1, 0), torch.zeros(7, 16, 0).transpose(1, 2)):
        y, p, _ = f(x, r)
        assert y is x and p.stride() == torch.hstack([x, x]).prod(-1).stride()


def test_loops_over_nothing_do_not_meet_others():
    """Loops of no elements were divided by where kernels were joined."""
    def f(x, a, b):
        v = torch.nn.functional.silu(x * a.exp().sum())
        w = v * b.exp().sum()
        return w, a + x.mean(), b + v.mean()
    args = torch.zeros(200).as_strided((0, 2, 6, 8), (1, 1, 2, 12)), torch.zeros(4), torch.zeros(4)
    with torch.no_grad():
        for ours, eager in zip(vitrify.compile(f)(*args), f(*args)):
            torch.testing.assert_close(ours, eager, equal_nan=True)
            assert ours.stride() == eager.stride()
