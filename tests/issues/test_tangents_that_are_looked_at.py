"""A derivative of the user's may look at how its gradient lies: its strides, its lazy bits, whether it can be viewed. It finds what eager's finds, where sizes differ from call to
call and where the gradient is differentiated again too; and what it makes by default is of the default dtype of the time when it runs."""
import expects
import pytest
import torch
import vitrify


class Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * (2 if g.is_contiguous() else 5)


class Strides(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return g * (1 + g.stride(0) + 10 * g.stride(1))


class Viewed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return (g.view(-1) * x.cos().reshape(-1)).view(g.shape)


class Bits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * (3 if g.is_conj() else 2) + (1 if g.is_neg() else 0)


class Itself(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.t() if g.stride(0) == 1 else g


LAYOUTS = {
    "contiguous": lambda n: torch.rand(n, n), "swapped": lambda n: torch.rand(n, n).t(), "columns": lambda n: torch.rand(n, 2 * n)[:, ::2], "a part": lambda n: torch.rand(n, n + 2)[:, :n],
    "rows": lambda n: torch.rand(2 * n, n)[::2], "swapped columns": lambda n: torch.rand(n, 2 * n)[:, ::2].t(), "expanded": lambda n: torch.rand(()).expand(n, n), "one row": lambda n: torch.rand(n).expand(n, n),
    "one column": lambda n: torch.rand(n, 1).expand(n, n), "negated": lambda n: torch._neg_view(torch.rand(n, n)), "negated, with gaps": lambda n: torch.rand(n, n, dtype=torch.complex64).conj().imag,
    "every third": lambda n: torch.rand(n, n, 3)[..., 1], "between": lambda n: torch.rand(n, 3, n)[:, 1],
}
COMPLEX = {"complex": lambda n: torch.rand(n, n, dtype=torch.complex64), "conjugate": lambda n: torch.rand(n, n, dtype=torch.complex64).conj(), "conjugate columns": lambda n: torch.rand(n, 2 * n, dtype=torch.complex64)[:, ::2].conj(), "conjugate, one row": lambda n: torch.rand(n, dtype=torch.complex64).conj().expand(n, n)}


def facts(t):
    return None if t is None else (t.stride(), t.is_conj(), t.is_neg(), t.requires_grad)


def run(f, n, make, again):
    torch.manual_seed(n)
    tangent = make(n)
    x = torch.rand(n, n, dtype=tangent.dtype, requires_grad=True)
    if again == "of the tangent":
        tangent.requires_grad_()
    try:
        g, = torch.autograd.grad(f(x), x, tangent, create_graph=bool(again))
        found = [g]
        if again and g.requires_grad:
            found += torch.autograd.grad(g.abs().square().sum(), [x, tangent] if tangent.requires_grad else [x], allow_unused=True)
    except RuntimeError as e:
        return str(e).partition("\n")[0], None
    return found, [facts(t) for t in found]


@pytest.mark.parametrize("again", ["", "again", "of the tangent"])
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("looks", [Contiguous, Strides, Viewed, Bits, Itself])
def test_how_a_gradient_lies(looks, dynamic, again):
    if not again:
        expects.eager("they come in too many sizes or layouts")  # the last of them
    before = dict(vitrify.counters)
    for layouts in (LAYOUTS, COMPLEX) if looks is Bits else (LAYOUTS,):
        f = vitrify.compile(lambda x: looks.apply(x), dynamic=dynamic)
        for name, make in layouts.items():
            for n in (4, 4, 6) if dynamic else (4, 4):
                ours, eager = run(f, n, make, again), run(looks.apply, n, make, again)
                assert ours[1] == eager[1], name
                if isinstance(eager[0], str):
                    assert ours == eager, name
                else:
                    torch.testing.assert_close(ours[0], eager[0], msg=name)
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    assert did["compiled_calls"] and not did["eager_calls"]


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
def test_parts_of_what_is_put_together_behind_the_call(dynamic):
    grads = []
    for f in (Contiguous.apply, vitrify.compile(lambda x: Contiguous.apply(x), dynamic=dynamic)):
        for n in (4, 5):
            x = torch.ones(n, 4, requires_grad=True)
            torch.cat([f(x), x], 1).square().sum().backward()
            grads.append(x.grad)
    assert all(torch.equal(a, b) for a, b in zip(grads[:2], grads[2:])) and vitrify.counters["eager_calls"] == 0


class Default(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return (g * ((torch.ones(4) + 1e-9) - 1) * 1e9).float()


@pytest.mark.parametrize("again", [False, True], ids=["once", "create_graph"])
def test_the_default_dtype_by_the_time_of_the_backward(again):
    results = []
    for f in (Default.apply, vitrify.compile(lambda x: Default.apply(x))):
        x = torch.linspace(0, 1, 4).requires_grad_()
        for dtype in (torch.float32, torch.float64, torch.float32):
            y = f(x)
            try:
                torch.set_default_dtype(dtype)
                g, = torch.autograd.grad(y, x, torch.ones(4, dtype=torch.float32), create_graph=again)
            finally:
                torch.set_default_dtype(torch.float32)
            results.append(g.detach())
    assert len({round(g[0].item()) for g in results}) == 2
    torch.testing.assert_close(results[:3], results[3:])
