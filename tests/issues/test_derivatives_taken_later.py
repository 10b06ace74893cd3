"""Derivatives that are taken after the program's trace: of batches, of gradients, for some results. Each is eager's, and for the calls that it was taken for."""
import functools

import pytest
import torch
import vitrify
from torch.autograd.functional import hessian, jacobian
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

FIRST = torch.tensor([0])


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g * 3


def same(fn, program, *makes, **options):
    """`program(f, *args)` with `fn` and with `fn` compiled."""
    given = []
    for f in (fn, vitrify.compile(fn, fullgraph=True, **options)):
        torch.manual_seed(0)
        given.append([program(f, *make()) for make in makes])
    torch.testing.assert_close(given[1], given[0], equal_nan=True)
    assert vitrify.counters["fallbacks"] == 0 and vitrify.counters["eager_calls"] == 0


def leaf(*sizes, value=None):
    return (torch.ones(sizes) if value is None else torch.tensor(value)).requires_grad_()


def product(x):
    return x.index_reduce(0, FIRST, torch.ones(1, 3), "prod")


def first_order(f, *given):
    return torch.autograd.grad(f(*given).sum(), given[0], create_graph=True)[0].detach()


def second_order(f, *given):
    first = torch.autograd.grad(f(*given).sin().sum(), given, create_graph=True)
    return [g.detach() for g in first], torch.autograd.grad(sum(g.sin().sum() for g in first), given)


@pytest.mark.parametrize("fn, program", [
    (lambda x: (x * x * x.detach()).sum(), lambda f, x: hessian(f, x, vectorize=True, create_graph=True)),
    (lambda x: x * x.detach(), lambda f, x: jacobian(f, x, vectorize=True, create_graph=True)),
    (lambda x: Straight.apply(x) * x, lambda f, x: jacobian(f, x, vectorize=True, create_graph=True)),
    (lambda h: h.sigmoid_() * 2, lambda f, x: torch.autograd.grad(f(x * 1), x, torch.eye(2), is_grads_batched=True, create_graph=True)[0]),
], ids=["hessian", "detach", "custom", "written"])
def test_batches(fn, program):
    same(fn, program, lambda: [leaf(2)])


def test_gradients_of_a_batch_of_gradients():
    def program(f, x):
        jac, = torch.autograd.grad(f(x), x, torch.eye(3), is_grads_batched=True, create_graph=True)
        return jac.detach(), jac.stride(), torch.autograd.grad(jac.square().sum(), x)
    same(lambda x: x.exp() * x.sum(), program, lambda: [leaf(value=[0.1, 0.2, 0.3])])


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("fn", [lambda x: product(x * x.detach()), lambda x: product(Straight.apply(x))], ids=["detach", "custom"])
def test_formulas_that_look_at_values(fn):
    same(fn, first_order, lambda: [leaf(2, 3)])


def test_formulas_that_look_at_values_of_what_was_written():
    def fn(a):
        a.sigmoid_()
        return product(a * 2)

    def program(f, x):
        return torch.autograd.grad(f(x * 2).sum(), x, create_graph=True)[0].detach()
    same(fn, program, lambda: [leaf(2, 3)])


def test_formulas_that_look_at_values_written_since():
    def program(f, x):
        h = x * 1
        y = f(h)
        h.data.add_(1)
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0].detach()
    same(lambda h: product(h.exp()), program, lambda: [leaf(2, 3)])


def test_what_a_formula_looks_at_changes():
    """Each way has a derivative of its own: with two zeros in one place eager has none of the second order."""
    def program(f, x, y):
        g = torch.autograd.grad(f(x, y).sum(), (x, y), create_graph=True)
        try:
            return g[0].detach(), g[1].detach(), torch.autograd.grad(sum(t.sin().sum() for t in g), (x, y))
        except RuntimeError as e:
            assert "unsupported" in str(e)
            return [t.detach() for t in g]

    def make(*values):
        return lambda: [leaf(2, 2), leaf(value=[list(values), [0.5, 2.0]])]
    same(lambda x, y: x.index_reduce(0, torch.tensor([1, 1]), y, "prod") * y.sum(), program, make(1.0, 2.0), make(0.0, 2.0), make(3.0, 4.0), make(5.0, 0.0))

    def two(values):
        return lambda: [leaf(2, 2), leaf(value=values)]
    same(lambda x, y: x.index_reduce(0, torch.tensor([1, 1]), y, "prod") * y.sum(), program, two([[1.0, 2.0], [3.0, 4.0]]), two([[0.0, 2.0], [0.0, 4.0]]),
         two([[2.0, 2.0], [3.0, 4.0]]), two([[0.0, 2.0], [0.0, 1.0]]))


def test_determinants_of_complex_matrices():
    def program(f, x):
        g, = torch.autograd.grad(f(x), x, create_graph=True)
        return g.detach(), torch.autograd.grad(g.abs().square().sum(), x)[0]

    def make(corner):
        return lambda: [torch.tensor([[2.0, 1j], [corner, 3]], dtype=torch.complex128, requires_grad=True)]
    same(lambda x: torch.linalg.det(x).abs() * 2, program, make(0), make(1), make(2j))


def copied_rows(a, b):
    c = a + b
    d = c.clone()
    d[1:].copy_(a[1:])
    return c, d


def halves(a, b):
    d = torch.zeros(a.shape[0], 12)
    d[:, :6] = a
    d[:, 6:] = b
    return d.square()


def test_some_results_in_other_sizes():
    def program(f, *given):
        return torch.autograd.grad(f(*given)[-1].sum(), given)[0]
    same(copied_rows, program, *(lambda n=n: [leaf(4, n), leaf(4, n)] for n in (6, 7, 9)))


def test_slices_in_other_sizes():
    same(halves, second_order, *(lambda n=n: [leaf(n, 6), leaf(n, 6)] for n in (4, 5, 7)))


def test_a_slice_that_begins_at_a_size():
    """Where it begins in its memory was taken to stay as it was."""
    def fn(a, b):
        n = b.shape[0]
        d = torch.zeros(40, 3)
        d[n:n + 2] = a
        return d.square() * b.sum()

    def program(f, a, b):
        return torch.autograd.grad((f(a, b) * torch.arange(120.0).view(40, 3)).sum(), a)
    same(fn, program, *(lambda n=n: [leaf(2, 3), torch.ones(n, 2)] for n in (5, 7, 5, 9)), dynamic=True)


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("fn", [lambda x: (x.prod(0), x.cumprod(1)), lambda x: (x.var(0), x.exp().mean(1)), lambda x: (x.sin(), x.repeat(2, 1).unfold(0, 2, 2).sum(-1))],
                         ids=["products", "statistics", "windows"])
def test_derivatives_for_some_sizes(fn, dynamic):
    def program(f, x, which, again):
        out = f(x)
        g, = torch.autograd.grad(out[which].sin().sum(), x, create_graph=again)
        return [g.detach(), torch.autograd.grad(g.sin().sum(), x)[0]] if again else [g]
    calls = [(4, 0, False), (3, 1, True), (2, 1, False), (5, 0, True), (4, 1, True), (3, 0, True), (6, 1, False), (2, 0, True), (5, 1, True)]
    same(fn, program, *(lambda n=n, w=w, a=a: [torch.linspace(0.5, 2, 3 * n).view(n, 3).requires_grad_(), w, a] for n, w, a in calls), dynamic=dynamic)


class OnlyOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return g * float(g.sum()) if torch.is_grad_enabled() else g


@pytest.mark.eager("fn cannot be compiled: reads a tensor's value: aten::item")
def test_what_cannot_be_taken_says_so_and_runs_eagerly_from_then_on():
    def fn(x):
        return OnlyOnce.apply(x) * 2
    compiled = vitrify.compile(fn)
    x = leaf(3)
    with pytest.raises(RuntimeError, match="fn cannot be compiled: reads a tensor's value: aten::item; calls from now on run eagerly: make the result again"):
        torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    assert torch.equal(torch.autograd.grad(compiled(x).sum(), x, create_graph=True)[0], torch.autograd.grad(fn(x).sum(), x, create_graph=True)[0])
    assert vitrify.counters["eager_calls"] == 1


def test_gradients_of_gradients_of_complex_numbers():
    """Some are lazy conjugates."""
    def fn(x, y):
        return torch.polar(x, y) * torch.complex(y, x).conj()

    def program(f, *given):
        first = torch.autograd.grad(f(*given).abs().square().sum(), given, create_graph=True)
        return [g.detach() for g in first], torch.autograd.grad(sum(g.sin().sum() for g in first), given)
    same(fn, program, lambda: [leaf(value=[0.5, 1.5]), leaf(value=[2.0, 0.3])])
    same(lambda z: (z * z.conj().exp()), second_of_complex, lambda: [torch.tensor([1 + 2j, 0.5j], requires_grad=True)])
    same(lambda z: z.conj() * 1j, second_of_complex, lambda: [torch.tensor([1 + 2j, 0.5j], requires_grad=True)])


def second_of_complex(f, z):
    tangent = torch.ones_like(z).requires_grad_()
    first, = torch.autograd.grad(f(z), z, tangent, create_graph=True)
    second = torch.autograd.grad(first, [z, tangent], torch.full_like(first, 1j), allow_unused=True)
    return [first.detach(), *second, [t is not None and t.is_conj() for t in second]]


def matrix(dtype=torch.float64):
    return (torch.randn(3, 3, generator=torch.Generator().manual_seed(1), dtype=dtype) + 2 * torch.diag(torch.arange(3.0))).requires_grad_()


def test_formulas_that_check_values():
    """What eager reads only to raise is checked by the plan."""
    same(lambda x: torch.linalg.eigvals(x * 2).abs(), second_order, lambda: [matrix()])
    same(lambda x: torch.linalg.eig(x * 2)[1].abs(), lambda f, x: torch.autograd.grad(f(x).sum(), x), lambda: [matrix()])


@pytest.mark.parametrize("fn", [lambda x: torch.linalg.eig(x)[1].sum().abs() * 2, lambda x: torch.linalg.eigh(x + x.mH)[1].sum().abs() * 2, lambda x: torch.linalg.svd(x)[0].sum().abs() * 2],
                         ids=["eig", "eigh", "svd"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_what_formulas_check_is_raised(fn, create_graph):
    said = []
    for f in (fn, vitrify.compile(fn, fullgraph=True)):
        x = matrix(torch.complex128)
        y = f(x)
        with pytest.raises(RuntimeError, match="ill-defined") as e:
            torch.autograd.grad(y, x, create_graph=create_graph)
        said.append(str(e.value).partition("\n")[0])
    assert said[0] == said[1]


def save_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("tangent", ["as recorded", "expanded", "transposed", "differentiable"])
def test_selective_checkpoints(tangent):
    """What one has cached was gone after the first derivative: the next came to a checkpoint that had none."""
    def program(x, w):
        return checkpoint(lambda x, w: (x @ w).tanh() @ w.t(), x, w, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, save_products))

    def run(f):
        args = [torch.randn(n, 5, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (4, 5)]
        y = f(*args)
        if tangent == "as recorded":
            return torch.autograd.grad(y, args, torch.ones(4, 5))
        if tangent == "transposed":
            return torch.autograd.grad(y, args, torch.arange(20.0).view(5, 4).t())
        return torch.autograd.grad(y.sum(), args, create_graph=tangent == "differentiable")
    compiled = vitrify.compile(program, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(run(compiled), run(program))


def cached(fn, of=save_products):
    return lambda *args: checkpoint(fn, *args, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, of))


def save_sines(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.sin.default else CheckpointPolicy.PREFER_RECOMPUTE


ONCE = {
    "product": cached(lambda x, w: (x @ w).tanh()),
    "sine": cached(lambda x, w: (x.sin() @ w).exp(), save_sines),
    "nothing taken": cached(lambda x, w: x.tanh() @ w),
    "nothing cached": cached(lambda x, w: (x @ w).tanh(), save_sines),
    "in the middle": lambda x, w: (cached(lambda x, w: (x @ w).tanh())(x.cos(), w) * w).sin(),
    "two": lambda x, w: (cached(lambda x, w: (x @ w).tanh())(x, w), cached(lambda x, w: (x @ w).tanh().cos())(x, w)),
    "behind each other": lambda x, w: cached(lambda x, w: (x @ w).tanh())(cached(lambda x, w: (x @ w).tanh().cos())(x, w), w),
}


@pytest.mark.parametrize("second", ["again", "freed", "others", "of the last", "of the gradient", "differentiable first"])
@pytest.mark.parametrize("name", ONCE)
def test_a_second_backward_through_a_selective_checkpoint(name, second):
    """Eager's finds what was cached taken by the first, and says so."""
    def run(f):
        x, w = (torch.randn(4, 4, generator=torch.Generator().manual_seed(n)).mul_(0.5).requires_grad_() for n in (4, 5))
        y = f(x, w)
        y = y if isinstance(y, tuple) else (y,)
        first = torch.autograd.grad(y[0].sum(), x if second == "others" else (x, w), retain_graph=second != "freed", create_graph=second in ("of the gradient", "differentiable first"))
        try:
            then = torch.autograd.grad(sum(t.square().sum() for t in first) if second == "of the gradient" else y[-1 if second == "of the last" else 0].sum(), w if second == "others" else (x, w))
        except RuntimeError as e:
            then = str(e).split(", but")[0]
        return [t.detach() for t in first], then
    (eager, then), (ours, then_ours) = run(ONCE[name]), run(vitrify.compile(ONCE[name], fullgraph=True))
    torch.testing.assert_close(ours, eager)
    if isinstance(then, str):
        assert then_ours == then
    else:
        torch.testing.assert_close(then_ours, then)


class Keeps(torch.nn.Module):
    """Its last features stay in a buffer, for a loss of their own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("h", torch.zeros(3))
        self.w, self.v = (torch.nn.Parameter(torch.full((3,), k)) for k in (1.0, 2.0))

    def forward(self, x):
        self.h.copy_((x * self.w).tanh())
        return x * self.v


def of_features(module, f):
    y = f(torch.ones(3))
    module.h.square().sum().backward(retain_graph=True)
    (y.sum() + module.h.sum()).backward()


def of_features_only(module, f):
    f(torch.ones(3))
    g, = torch.autograd.grad(module.h.sum(), module.w, create_graph=True)
    (g.sum() + module.h.sum()).backward()


def thawed_in_between(module, f):
    module.requires_grad_(False)
    y = f(torch.ones(3, requires_grad=True))
    module.requires_grad_(True)
    y.sum().backward()
    f(torch.ones(3)).sum().backward()


@pytest.mark.parametrize("use", [of_features, of_features_only, thawed_in_between], ids=lambda f: f.__name__)
def test_what_a_program_finds_is_left_as_it_is(use):
    """A derivative that is compiled later set what the program had found back to the history of the capture."""
    told = []
    for compiled in (True, False):
        module = Keeps()
        f = vitrify.compile(module) if compiled else module
        for _ in range(2):
            use(module, f)
            told.append([module.h.requires_grad, module.w.requires_grad, module.w.grad, module.v.grad])
            module.h = module.h.detach()
    for ours, eager in zip(told[:2], told[2:]):
        assert ours[:2] == eager[:2]
        torch.testing.assert_close(ours[2:], eager[2:])


@pytest.mark.eager("takes gradients in a backward of its own")
def test_a_checkpoint_that_takes_a_gradient_and_is_differentiated_twice():
    def program(x, w):
        return checkpoint(lambda x, w: torch.autograd.grad((x * w).sin().sum(), x, create_graph=True)[0] * w, x, w, use_reentrant=False)

    def run(f):
        args = [torch.linspace(*ends, 3, dtype=torch.float64).requires_grad_() for ends in ((0.5, 2), (1, 3))]
        grads = torch.autograd.grad(f(*args).sum(), args, create_graph=True)
        return [*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), args)]
    torch.testing.assert_close(run(vitrify.compile(program)), run(program))
