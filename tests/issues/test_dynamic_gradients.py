"""Gradients of programs with dynamic sizes: what a derivative's own views look at, and where the sizes come from when gradients come through some of the results."""
import warnings

import pytest
import torch
import vitrify

pytestmark = pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")


def leaf(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(True)


def gradients(fn, shapes, then):
    given = [leaf(*s, seed=i) for i, s in enumerate(shapes)]
    then(fn(*given))
    return [t.grad for t in given]


def check(fn, *calls, then, dynamic=True):
    compiled, before = vitrify.compile(fn, dynamic=dynamic, fullgraph=True), dict(vitrify.counters)
    for shapes in calls:
        for ours, eager in zip(gradients(compiled, shapes, then), gradients(fn, shapes, then)):
            assert (ours is None) == (eager is None)
            if eager is not None:
                torch.testing.assert_close(ours, eager)
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"]
    assert vitrify.counters["eager_calls"] == before["eager_calls"]


def weighed(t):
    return (t * torch.arange(1.0, t.numel() + 1).view(t.shape)).sum()


def as_strided(x):
    x = x * 2
    return x.as_strided(x.shape, x.stride())


@pytest.mark.parametrize("dynamic", [True, False])
def test_as_strided(dynamic):
    """The derivative writes the gradient to memory of its own through sizes that are symbols: their values were taken for zeros, and the gradient was zero."""
    check(as_strided, [(1, 16, 12, 12)], [(1, 5, 3, 7)], then=lambda out: weighed(out).backward(), dynamic=dynamic)


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 1, 1)], ids=str)
def test_sizes_of_what_was_freed(order):
    """A sum saves nothing: its gradient needs a size alone, which was freed with the tensor."""
    def then(out):
        for i in order:
            weighed(out[i]).backward()
    check(lambda x, y, z: (y * z, x.sum(0, keepdim=True)), [(3, 30, 25), (1, 1, 25), (3, 1, 25)], [(4, 31, 26), (1, 1, 26), (4, 1, 26)], then=then)


def test_a_second_time():
    x, y = leaf(3, 4), leaf(3, 4, seed=1)
    first, _ = vitrify.compile(lambda x, y: (x * y, x.sum(0)), dynamic=True)(x, y)
    first.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        first.sum().backward()


@pytest.mark.parametrize("which", [0, 1])
def test_sizes_where_a_result_has_no_gradient(which):
    """The missing gradient was all that told the sizes."""
    check(lambda x: ((s := torch.sign(x)).repeat(1, 2).tile(2), s), [(8, 7)], [(9, 6)], then=lambda out: weighed(out[which]).backward())


def test_halves_swapped():
    """A proof asked for a quotient, and that for the proof again, until the stack was full."""
    check(lambda x: x.reshape(-1, 2, x.shape[-1] // 2).transpose(1, 2).reshape(x.shape).sin(), [(2, 8)], [(6, 12)], then=lambda out: weighed(out).backward())


def test_many_transposes():
    """Indices of indices: factors of what is modulo a size grew with each."""
    def fn(x):
        for _ in range(24):
            x = x.transpose(0, 1).reshape(x.shape)
        return x.sin()
    check(fn, [(33, 4)], then=lambda out: weighed(out).backward(), dynamic=False)


@pytest.mark.parametrize("fn", [lambda x, w: (x * w[0]).prod(0), lambda x, w: torch.nn.functional.batch_norm(x, None, None, w[0], w[1], True), lambda x, w: x.cumprod(0) @ w], ids=["prod", "batch_norm", "cumprod"])
def test_gradients_of_gradients_that_hold_for_some_sizes(fn):
    """A formula that looks at a size had its answer kept for all sizes: gradients of another size, or wrong ones."""
    compiled = vitrify.compile(fn, dynamic=True)
    for n, twice in [(4, False), (6, False), (6, True), (8, True), (5, True), (8, False), (6, True)]:
        grads = []
        for f in (compiled, fn):
            x, w = (t.detach().double().requires_grad_(True) for t in (leaf(n, 4), leaf(4, 4, seed=1)))
            out = f(x, w)
            if twice:
                first = torch.autograd.grad(weighed(out.sin()), (x, w), create_graph=True)
                sum(weighed(g * g) for g in first).backward()
                grads.append([*first, x.grad, w.grad])
            else:
                weighed(out).backward()
                grads.append([x.grad, w.grad])
        for ours, eager in zip(*grads):
            torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("name, f", [
    ("elementwise", lambda x: (x * 2).sin()), ("expanded", lambda x: (x * 2).sum(0)), ("product", lambda x: x.t() @ x), ("largest", lambda x: x * x.max())])
@pytest.mark.parametrize("dynamic", [True, False])
def test_batched_gradients(name, f, dynamic):
    """Formulas of a batch may fix sizes, or look at values: its gradients are computed one by one, by the kernels of any other."""
    compiled, before = vitrify.compile(f, dynamic=dynamic), dict(vitrify.counters)
    for n in (3, 5):
        told = []
        for call in (f, compiled):
            x = torch.arange(4.0 * n).view(n, 4).requires_grad_()
            out = call(x)
            told.append(torch.autograd.grad(out, x, torch.eye(3, out.numel()).view(3, *out.shape), is_grads_batched=True)[0])
        torch.testing.assert_close(told[1], told[0])
        assert told[1].stride() == told[0].stride()
    # The largest is chosen by what each gradient's elements are, and how a batch of those lies shows: eager's own formula, op by op.
    assert (vitrify.counters["fallbacks"] == before["fallbacks"] or (name, dynamic) == ("largest", True)) and vitrify.counters["kernels_launched"] > before["kernels_launched"]


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("shape", [(1, 2, 6, 8), (3, 2, 6, 8), (2, 1, 6, 8)], ids=str)
@pytest.mark.parametrize("name, f", [("maximum", torch.maximum), ("minimum of copies", lambda a, b: torch.minimum(b.clone(), a)), ("within", lambda a, b: torch.maximum(a, b).sin())])
def test_batched_gradients_of_what_is_written_lie_as_it_does(name, f, shape, dynamic):
    """The formula of maximum fills what it has made. Taken one by one, a batch of these has eager's layout all the same."""
    compiled, before = vitrify.compile(f, dynamic=dynamic), dict(vitrify.counters)
    for _ in range(2):
        x, told = torch.randn(shape).contiguous(memory_format=torch.channels_last).requires_grad_(), []
        for call in (f, compiled):
            out = call(x, x.view(shape))
            told.append(torch.autograd.grad(out, x, torch.eye(3, out.numel()).view(3, *shape), is_grads_batched=True)[0])
        torch.testing.assert_close(told[1], told[0])
        assert told[1].stride() == told[0].stride()
    assert vitrify.counters["fallbacks"] == before["fallbacks"] and vitrify.counters["kernels_launched"] > before["kernels_launched"]


def test_gradients_lie_as_their_tangents_do():
    compiled, before = vitrify.compile(lambda x, y: (y.sin() * 2, x.clone(), x * y), dynamic=True), dict(vitrify.counters)
    for which in (1, 2):
        for n in (4, 12, 4):
            for weight in (torch.randn(16, n, n), torch.randn(16, n, n).mT, torch.randn(n, n, 16).permute(2, 0, 1)):
                told = []
                for call in (lambda x, y: (y.sin() * 2, x.clone(), x * y), compiled):
                    x, y = torch.ones(16, n, n).mT.requires_grad_(), torch.ones(16, n, n).requires_grad_()
                    told.append(torch.autograd.grad((call(x, y)[which] * weight).sum(), x)[0])
                assert told[0].stride() == told[1].stride()
                torch.testing.assert_close(told[1], told[0])
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"] and vitrify.counters["eager_calls"] == before["eager_calls"]


JOINED = {
    "cat": lambda x, w: torch.cat([x, w], 1).square(),
    "hstack": lambda x, w: torch.hstack([x, w]).exp(),
    "stack last": lambda x, w: torch.stack([x, w], -1).square(),
    "stack middle": lambda x, w: torch.stack([x, w], 1).square(),
}


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", JOINED)
def test_tangents_that_are_slices(name, order):
    """The gradients of what was joined are slices; a tangent of theirs was given without gaps and read by the strides of a slice: out of bounds."""
    fn = JOINED[name]
    compiled = vitrify.compile(fn, dynamic=True, fullgraph=True)
    for shape in [(3, 2), (5, 4)]:
        results = []
        for f in (fn, compiled):
            given = [leaf(*shape, seed=i) for i in range(2)]
            grads = torch.autograd.grad(f(*given).sin().sum(), given, create_graph=True)
            for _ in range(order - 2):
                grads = torch.autograd.grad(sum(weighed(g) for g in grads), given, create_graph=True)
            results.append(torch.autograd.grad(sum(weighed(g) for g in grads), given))
        torch.testing.assert_close(results[1], results[0])


STRIDED = {
    "itself": lambda x: x.frac(),
    "zeros": lambda x: x.trunc(),
    "elementwise": lambda x: (x * x).sin() + x,
    "swapped": lambda x: (x + 2).swapaxes(-2, -1),
    "more dims": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "joined": lambda x: torch.cat([x, x], 0),
}
USES = {
    "sum": lambda y: y.sum(),
    "dense": lambda y: (y * torch.ones(y.shape)).sum(),
    "in another order": lambda y: y.transpose(0, -1).mul(torch.ones(y.transpose(0, -1).shape)).sum(),
    "rows": lambda y: y.sum(0).square().sum(),
    "columns": lambda y: y.sum(-1).square().sum(),
}


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("some gradients are the tangents, or have no elements", some=True)
@pytest.mark.parametrize("sizes", [[(4, 3), (5, 2), (4, 3)], [(1, 8), (1, 12)], [(8, 1), (12, 1)], [(2, 3, 4), (3, 5, 2)], [(3, 1, 4), (5, 1, 2)], [(7, 6, 0, 6)], [(3, 0)], [(0, 3)]], ids=str)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", STRIDED)
def test_strides_of_gradients(name, use, sizes):
    """They follow from the tangent's as in eager: from its order, from what of it is expanded, and from where its dims of one element lie."""
    compiled = vitrify.compile(STRIDED[name], dynamic=True, fullgraph=True)
    for size in sizes:
        given = []
        for f in (STRIDED[name], compiled):
            x = torch.linspace(0.5, 3, torch.Size(size).numel()).view(size).requires_grad_()
            g, = torch.autograd.grad(USES[use](f(x)), x)
            given.append((g.stride(), g))
        torch.testing.assert_close(given[1][1], given[0][1])
        assert given[1][0] == given[0][0], size


@pytest.mark.parametrize("behind", [lambda y: y.flatten(1), lambda y: y.transpose(1, 2)], ids=["flatten", "transpose"])
def test_third_derivatives_of_another_size(behind):
    """Where a view begins was asked for while the mode was on the stack, which took what finds it for a call of the program's."""
    def fn(x, w):
        return behind(torch.nn.functional.conv2d(x, w)).sin().mean()
    compiled = vitrify.compile(fn, fullgraph=True, dynamic=True)
    for n in (4, 5, 3):
        results = []
        for f in (compiled, fn):
            generator = torch.Generator().manual_seed(n)
            x, w = torch.randn(n, 2, 6, 6, generator=generator), torch.randn(4, 2, 3, 3, generator=generator).requires_grad_()
            g, = torch.autograd.grad(f(x, w), w, create_graph=True)
            g, = torch.autograd.grad(g.square().sum(), w, create_graph=True)
            results.append(torch.autograd.grad(g.square().sum(), w)[0])
        torch.testing.assert_close(*results)


@pytest.mark.parametrize("shapes", [[(2, 8, 5, 7), (3, 8, 4, 6)], [(3, 8, 4, 6), (1, 8, 2, 9)]], ids=str)
def test_values_looked_at_where_nothing_says_the_sizes(shapes):
    """Gradients of the gradients of cumprod go by whether there are zeros. What computes its operand again reads only what the norm has kept, which has other sizes than the argument."""
    def fn(x, w):
        v = torch.instance_norm(x, w, None, None, None, True, 0.1, 1e-5, False)
        return torch.cumprod(v.narrow(3, 0, min(v.shape[3], 99)), 3)

    compiled = vitrify.compile(fn, dynamic=True, fullgraph=True)
    for shape in shapes:
        x, results = leaf(*shape).detach().double(), []
        for f in (compiled, fn):
            w = torch.linspace(0.5, 1.5, 8, dtype=torch.float64).requires_grad_(True)
            first = torch.autograd.grad(weighed(f(x, w)), w, create_graph=True)
            results.append([*first, *torch.autograd.grad(first[0].square().sum(), w)])
        for ours, eager in zip(*results):
            torch.testing.assert_close(ours, eager)
