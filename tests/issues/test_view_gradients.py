"""Gradients that meet at a tensor are added in the strides of the first, and which is the first is decided by the ops that saw the tensor last. Views that a program
returns are made around it: what came back through one was taken for older than it is where the program itself went through the same view, or where gradients came
through the others only. A view that is returned twice was made before all others."""
import pytest
import torch
import vitrify

pytestmark = pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")


def used_later(x):
    x = x.clone()
    v = x.movedim(0, -1)
    part = v[..., ::2]  # older than
    return part, torch.relu(v)


def used_earlier(x):
    x = x * 3
    v = x.mT
    out = v.cumsum(1)
    return v[..., ::2], out


def of_an_argument(x):
    v = x.movedim(0, -1)
    part = v[..., ::2]
    return part, torch.relu(v)


def older_view_of_a_view(x):
    x = x * 3
    part = x[1:]
    v = x.mT
    out = v.sin()
    return part.unsqueeze(1).squeeze(1), out[1:], v  # the first is made last, of what was made first


def some_of_the_views(x):
    x = x.clone()
    a, b = x.movedim(2, 1), x.mT
    return a, b, torch.tanh(b), torch.roll(x, 1, -2)


def three_views(x):
    x = x * 3
    a, b, c = x[1:], x.permute(2, 0, 1), x.mT
    return b.cumsum(1), a, c


def one_view_twice(x):
    x = x * 3
    a, b = x.mT, x[..., ::2]
    return a, b, b


def used_between(x):
    x = x * 3
    before = x.sin()
    v = x.permute(2, 1, 0)
    return before, v, torch.bmm(v, torch.ones(5, 4, 4)).sin()


def used_between_and_on_either_side(x):
    x = x * 3
    before = x.sin()
    v = x.permute(2, 1, 0)
    return before, x.tanh(), v, v.cumsum(1), x.permute(1, 2, 0)


CASES = [(f, None) for f in (used_between, used_between_and_on_either_side, used_later, used_earlier, of_an_argument, older_view_of_a_view, some_of_the_views, three_views, one_view_twice)]
CASES += [(used_between, (0, 1)), (used_between, (0, 2)), (used_between, (1, 2)), (used_between_and_on_either_side, (0, 2)),
          (used_between_and_on_either_side, (0, 1, 2)), (used_between_and_on_either_side, (0, 4))]
CASES += [(used_later, (0,)), (older_view_of_a_view, (0, 1)), (some_of_the_views, (0, 2)), (some_of_the_views, (1, 2)), (some_of_the_views, (0, 2, 3)),
          (one_view_twice, (0, 2)), (three_views, (0, 1)), (three_views, (0, 2)), (three_views, (1, 2))]


def gradients(f, x, used, again=False):
    x = x.detach().requires_grad_()
    out = f(x)
    heads = [out[i] for i in used or range(len(out))]
    tangents = [torch.linspace(-1, 1, t.numel()).view(t.shape).requires_grad_(again) for t in heads]
    g, = torch.autograd.grad(heads, x, tangents, create_graph=again)
    return [g, *torch.autograd.grad(g, tangents, g.sin().detach())] if again else [g]


@pytest.mark.parametrize("again", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("f,used", CASES, ids=[f"{f.__name__} {used or 'all'}" for f, used in CASES])
def test_strides(f, used, again):
    torch.manual_seed(0)
    compiled = vitrify.compile(f)
    for x in (torch.randn(4, 6, 5), torch.randn(5, 4, 6).permute(1, 2, 0)):
        for _ in range(2):
            for mine, eager in zip(gradients(compiled, x, used, again), gradients(f, x, used, again)):
                assert mine.stride() == eager.stride()
                torch.testing.assert_close(mine, eager)
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["fallbacks"] == vitrify.counters["eager_calls"] == 0


def test_one_program_for_all_of_them():
    """The same call, asked for gradients through some of its views and then through others."""
    torch.manual_seed(0)
    compiled, x = vitrify.compile(some_of_the_views), torch.randn(4, 6, 5)
    for used in [(0, 2), (1, 2), (0, 1, 2), (2,), (0,), (1,), (0, 2), None]:
        (mine,), (eager,) = gradients(compiled, x, used), gradients(some_of_the_views, x, used)
        assert mine.stride() == eager.stride(), used
        torch.testing.assert_close(mine, eager)
    assert vitrify.counters["captures"] == 1 and vitrify.counters["fallbacks"] == vitrify.counters["eager_calls"] == 0


def test_a_view_written_to_afterwards():
    torch.manual_seed(0)
    x = torch.randn(4, 6, 5)

    def run(f):
        leaf = x.detach().requires_grad_()
        a, b, c, d = f(leaf)
        a.mul_(2)
        return torch.autograd.grad(a.sum() + b.sin().sum() + d.sum(), leaf)[0]
    mine, eager = run(vitrify.compile(some_of_the_views)), run(some_of_the_views)
    assert mine.stride() == eager.stride()
    torch.testing.assert_close(mine, eager)
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["fallbacks"] == vitrify.counters["eager_calls"] == 0


def swapped(x):
    y = x * 2
    before = y.view(-1)
    y.swapaxes_(0, 2)
    after = y[1:]
    return before, after, after.sin()


def unsqueezed(x):
    y = x * 2
    y.unsqueeze_(0)
    return y.movedim(-1, 0), y.transpose(1, 2), y.exp()


def written(x):
    y = x * 2
    before = y.permute(2, 1, 0)
    y.transpose_(0, 1)
    before.pow_(2)
    y.neg_()
    return y.expand(2, *y.shape).movedim(0, 2), before


@pytest.mark.parametrize("f", [swapped, unsqueezed, written], ids=lambda f: f.__name__)
@pytest.mark.parametrize("which", [0, 1, slice(None)], ids=str)
def test_views_of_what_was_reshaped_in_place(f, which):
    told = []
    for call in (f, vitrify.compile(f)):
        x = torch.arange(24.0).view(2, 3, 4).div(9).requires_grad_()
        out = call(x)
        some = out[which] if isinstance(which, slice) else [out[which]]
        sum((o * torch.arange(1.0, o.numel() + 1).view(o.shape)).sum() for o in some).backward()
        told.append([*out, x.grad])
        assert out[0].untyped_storage().data_ptr() == out[1].untyped_storage().data_ptr()
    for ours, eager in zip(*reversed(told)):
        torch.testing.assert_close(ours, eager)
        assert ours.stride() == eager.stride() and ours.storage_offset() == eager.storage_offset()
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["eager_calls"] == 0


@pytest.mark.parametrize("f, x", [
    (lambda x: (x * 2).mT, torch.randn(8, 1)), (lambda x: (x * 2).flatten(1), torch.randn(4, 33, 1).permute(2, 1, 0)), (lambda x: x.sin().unflatten(1, (3, 11)), torch.randn(4, 33, 1).permute(2, 1, 0))])
@pytest.mark.parametrize("seen", [False, True])
def test_strides_of_dims_of_one_element(f, x, seen):
    """A leaf takes its first gradient as it comes, where its strides differ in such dims only; the second is added to it."""
    told = []
    compiled, before = vitrify.compile(f, dynamic=False), dict(vitrify.counters)
    for call in (f, compiled):
        leaf, strides = x.detach().requires_grad_(), []
        for grad in (torch.ones_like, torch.zeros_like):
            out = call(leaf)
            if seen:
                strides.append(torch.autograd.grad((out * grad(out, memory_format=torch.contiguous_format)).sum(), leaf)[0].stride())
            else:
                (out * grad(out, memory_format=torch.contiguous_format)).sum().backward()
                strides.append(leaf.grad.stride())
        told.append(strides)
    assert told[1] == told[0]
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"] and vitrify.counters["eager_calls"] == before["eager_calls"]


@pytest.mark.no_kernels("there are no elements")
@pytest.mark.parametrize("shape", [(1, 4, 0, 1), (0, 1, 3), (2, 0)])
def test_gradients_without_elements_that_need_some(shape):
    """Their strides may be 0, as the tangent's are: they were taken for what overlaps itself, and gradients of gradients were refused."""
    results = []
    for f in (vitrify.compile(lambda x: x.sin() * 2, fullgraph=True), lambda x: x.sin() * 2):
        x = torch.randn(shape, requires_grad=True)
        (f(x) * torch.rand(shape)).sum().backward(create_graph=True)
        first = x.grad
        second, = torch.autograd.grad(first.square().sum(), x)
        results.append([(g.shape, g.stride()) for g in (first, second)])
    assert results[0] == results[1]


@pytest.mark.no_kernels("views", some=True)
@pytest.mark.parametrize("fn", [
    lambda x: (lambda y: (lambda v: (v, v.as_strided(v.shape, v.stride()), y))(y.view(-1)))(x * 2),
    lambda x: (lambda v: (v, v.as_strided(v.shape, v.stride())))((x * 2).view(-1)),
    lambda x: (lambda v: (v, v.as_strided(v.shape, v.stride()).view(2, 4).t(), x.exp()))((x * 2).t()),
    lambda x: (lambda y: (lambda v: (y.add_(1), v, v.as_strided(v.shape, v.stride()))[1:])(y.view(-1)))(x * 2),
    lambda x: (lambda y: (lambda v: (y.add_(1), v, v.view(2, 4), v[1:])[1:])(y.view(-1)))(x * 2),
], ids=["with its base", "without", "behind", "written", "written, other views"])
def test_hooks_of_a_view_whose_whole_memory_is_viewed(fn):
    """The gradient of as_strided() of all of a view goes through that view, as do those of its views where it was made again after a write."""
    runs = []
    for f in (fn, vitrify.compile(fn, fullgraph=True)):
        x, seen = torch.ones(4, 2, requires_grad=True), []
        out = f(x)
        out[0].register_hook(lambda g: (seen.append(g), g.clamp(-1, 1))[1])
        sum((t * (k + 1)).sum() for k, t in enumerate(out)).backward()
        runs.append([x.grad, *seen])
    assert len(runs[0]) == len(runs[1])
    torch.testing.assert_close(runs[1], runs[0])


@pytest.mark.parametrize("first", [lambda y: y[None, ..., -1], lambda y: y.exp(), lambda y: y.t()], ids=["a view", "a function", "transposed"])
def test_a_part_written_with_what_another_result_is_made_of(first):
    """Where gradients stop there, those of what was written end there with the part's, or torch's own check fails."""
    def fn(x):
        y = x.double()
        result, v = first(y), y.reshape(4, 2, -1).flip(-2).flatten(-2)
        v.sub_(y)
        return result, v
    results = []
    for f in (fn, vitrify.compile(fn, fullgraph=True)):
        x = torch.arange(32.0).view(4, 8).requires_grad_()
        sum((t * (i + 1)).sum() for i, t in enumerate(f(x))).backward()
        results.append(x.grad)
    torch.testing.assert_close(results[1], results[0])
