"""Bugs of training, once fixed."""
import warnings

import expects
import pytest
import torch
import vitrify


def test_gradients_come_back_through_an_alias():
    """A result that aliases another is a view that gradients follow, not a detached one."""
    def fn(x):
        y = x.exp()
        return y, torch.ops.aten.alias(y)
    grads = []
    for f in (fn, vitrify.compile(fn, fullgraph=True)):
        x = torch.full((3,), 0.5, requires_grad=True)
        a, b = f(x)
        assert b.requires_grad and b._base is a
        grads += torch.autograd.grad([a, b], [x], [torch.ones(3), torch.full((3,), 10.0)])
    torch.testing.assert_close(*grads)
    assert vitrify.counters["kernels_launched"] > 0


def test_writes_through_an_alias():
    def fn(x):
        y = x * 2
        torch.ops.aten.alias(y).add_(1)
        return y
    x = torch.arange(3.0)
    assert torch.equal(vitrify.compile(fn, fullgraph=True)(x), fn(x)) and vitrify.counters["kernels_launched"] > 0


def test_gradients_come_back_through_the_second_of_two_views():
    """Neither result is the tensor that both look at, and the first is detached from it."""
    def fn(x):
        y = x.exp()
        return y[0].detach(), y[1]
    grads = []
    for f in (fn, vitrify.compile(fn, fullgraph=True)):
        x = torch.arange(6.0).reshape(2, 3).requires_grad_()
        first, second = f(x)
        assert not first.requires_grad and second.requires_grad
        grads += torch.autograd.grad(second.sum(), x)
    torch.testing.assert_close(*grads)
    assert vitrify.counters["kernels_launched"] > 0


def test_less_memory_is_kept_for_a_smaller_budget():
    """Down to copies of what eager does not keep: to make a product again takes its bias as it was, and for the first its weight."""
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)) for _ in range(6)))
    x, kept, grads = torch.randn(128, 64), [], []
    weights = torch.randn(128, 64) / 128  # what a norm gives has no gradient by its squares
    for budget in (1.0, 0.5, 0.25, 0.0):
        model.zero_grad()
        compiled = vitrify.compile(model, fullgraph=True, options={"memory_budget": budget})
        (compiled(x) * weights).sum().backward()
        (graph, _), = vitrify._C.state_entries(vitrify._C.twin_state(compiled))
        kept.append(graph.stats["kept_bytes"])
        grads.append([p.grad.clone() for p in model.parameters()])
    assert 0 < kept[1] <= 0.5 * kept[0] and 0 < kept[2] <= 0.25 * kept[0] and kept[3] == 4 * (6 * 64 + 64 * 64), kept
    assert min(g.abs().max() for g in grads[0]) > 1e-3
    for g in grads[1:]:
        torch.testing.assert_close(grads[0], g)
    assert vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0


def test_a_bias_may_change_before_a_backward_that_makes_its_sums_again():
    first, second = torch.nn.Linear(8, 64), torch.nn.Linear(64, 8)
    grads, x = [], torch.randn(4, 8)
    for f in (eager := lambda x: second(first(x).tanh()).sin(), vitrify.compile(eager, fullgraph=True, options={"memory_budget": 0.0})):
        first.zero_grad(), second.zero_grad()
        loss = f(x).sum()
        with torch.no_grad():
            before = first.bias.clone()
            first.bias += 1
        loss.backward()
        with torch.no_grad():
            first.bias.copy_(before)
        grads.append([p.grad.clone() for p in (*first.parameters(), *second.parameters())])
    torch.testing.assert_close(*grads)
    assert vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0


FOLLOW = [lambda x: x.sin().t(), lambda x: (x * 2).t().exp(), lambda x: x.reshape(-1) * 3, lambda x: x[:, ::2].neg(), lambda x: x + 1, lambda x: torch.cat([x, x * 2]),
          lambda x: (x.exp(), x.cos().t())]


@pytest.mark.parametrize("fn", FOLLOW, ids=range(len(FOLLOW)))
def test_gradients_are_strided_as_their_tangents_make_them(fn):
    """Through one compiled call after another: contiguous tangents, transposed, expanded ones, every other element of a wider one."""
    def tangents(t):
        wide = torch.randn(*t.shape[:-1], 2 * t.shape[-1], generator=torch.Generator().manual_seed(2))
        some = wide[..., ::2]
        return [some.contiguous(), some.mT.contiguous().mT if t.dim() > 1 else some, wide[..., :1].expand(t.shape), some, torch.ones(()).expand(t.shape)]
    compiled = vitrify.compile(fn, fullgraph=True)
    for which in range(5):
        grads = []
        for f in (fn, compiled):
            x = torch.arange(12.0).reshape(3, 4).requires_grad_()
            out = f(x)
            out = out if isinstance(out, tuple) else (out,)
            grads += torch.autograd.grad(out, x, [tangents(t)[which] for t in out])
        assert grads[0].stride() == grads[1].stride(), which
        torch.testing.assert_close(*grads)
    assert vitrify.counters["captures"] == 1 and vitrify.counters["eager_calls"] == 0 and vitrify.counters["kernels_launched"] > 0


def test_one_derivative_for_all_strides_that_a_grad_does_not_show():
    w = torch.randn(3, 4, requires_grad=True)
    compiled = vitrify.compile(lambda: (w * 2).exp(), fullgraph=True)
    built = []
    for g in (torch.ones(3, 4), torch.ones(4, 3).t(), torch.ones(()).expand(3, 4)):
        w.grad = None
        compiled().backward(g)
        torch.testing.assert_close(w.grad, (2 * (w * 2).exp()).detach())
        assert w.grad.is_contiguous()
        built.append(vitrify.counters["kernels_built"])
    assert built[0] == built[2]


def test_tangents_of_sizes_that_change():
    """What comes back is contiguous, and the result it belongs to is not."""
    fn = lambda x: (x * 2).t().exp()  # noqa: E731
    compiled = vitrify.compile(fn, dynamic=True)
    for n in (4, 7, 5):
        grads = []
        for f in (fn, compiled):
            x = torch.linspace(0, 1, 3 * n).reshape(n, 3).requires_grad_()
            out = f(x)
            grads += torch.autograd.grad(out, x, torch.randn(3, n, generator=torch.Generator().manual_seed(n)))
        torch.testing.assert_close(*grads)
    assert vitrify.counters["captures"] == 1 and vitrify.counters["eager_calls"] == 0


def test_gradients_through_one_result_where_work_is_done_twice():
    """The trace has the mask once for each layer, what is kept has it once."""
    def fn(x, m):
        for _ in range(2):
            x = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=(1.0 - m.float()) * -1e4)
        return x * 2, x.detach().exp() + x
    m = torch.tensor([[1, 1, 0, 1]])
    grads = []
    for f in (fn, vitrify.compile(fn, fullgraph=True)):
        x = torch.linspace(-1, 1, 32).reshape(1, 1, 4, 8).requires_grad_()
        grads += torch.autograd.grad(f(x, m)[0].sum(), x)
    torch.testing.assert_close(*grads)
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["eager_calls"] == 0


@pytest.mark.eager("it writes Python state, as caches do at first: self.ready, self.inner._forward_hooks")
def test_hooks_that_a_forward_installs_stay_whole():
    """The capture that saw them installed is undone: an OrderedDict that lost a key by the back door raises when it is iterated."""
    class Lazy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.ready = torch.nn.Linear(3, 3), False

        def forward(self, x):
            if not self.ready:
                self.inner.register_forward_hook(lambda m, a, out: out * 2)
                self.ready = True
            return self.inner(x).exp()
    torch.manual_seed(0)
    module, x = Lazy(), torch.randn(2, 3)
    compiled = vitrify.compile(module)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), module(x))
        assert len(list(module.inner._forward_hooks.items())) == 1
    assert vitrify.counters["kernels_launched"] > 0


def views_of_views(x):
    v = x.exp()
    first = v.view(v.shape)
    return first.mT, first[1:], first, v[0]


def a_view_and_its_transpose(x):
    first = x.exp().view(x.shape)
    return first, first.mT


def a_view_after_its_transpose(x):
    first = x.exp().view(x.shape)
    return first.mT, first


def a_single_element_is_written(x):
    v = x.clone().contiguous()
    v[..., 0] = 3
    return v


def gradients_are_added_up(x):
    x = x.clone()
    first = x.clone()
    v = x ** 2
    return first, v, v.std(2, keepdim=True)


AS_EAGER = {
    "views of views, some before what they are views of": (views_of_views, lambda: [torch.randn(3, 4).requires_grad_()]),
    "a view and a view of it": (a_view_and_its_transpose, lambda: [torch.randn(3, 4).requires_grad_()]),
    "a view of a view and that": (a_view_after_its_transpose, lambda: [torch.randn(3, 4).requires_grad_()]),
    "two views, not in the order they were made in": (lambda x: (lambda v: (lambda a, b: (b, a))(v.mT, v.expand(2, 3, 4)))(x.exp()), lambda: [torch.randn(3, 4).requires_grad_()]),
    "relu of a transposed tensor": (torch.relu, lambda: [torch.randn(3, 4).t().requires_grad_()]),
    "leaky relu of a transposed tensor": (torch.nn.functional.leaky_relu, lambda: [torch.randn(3, 4).t().requires_grad_()]),
    "strides of one element": (a_single_element_is_written, lambda: [torch.ones(1).as_strided((1,), (2,)).requires_grad_()]),
    "strides of a sum in place": (gradients_are_added_up, lambda: [torch.empty_strided((7, 33, 33, 1), (33, 1, 231, 7623)).normal_().requires_grad_()]),
    "the largest of a transposed tensor": (lambda x: x.max(), lambda: [torch.randn(5, 3).t().requires_grad_()]),
    "a kernel's own strides": (lambda x: torch.fft.irfftn(x), lambda: [torch.randn(5, 6, 7).requires_grad_()]),
    "a sixth in float": (lambda x: torch.nn.functional.hardsigmoid(x), lambda: [torch.linspace(-4, 4, 9, dtype=torch.float64).requires_grad_()]),
    "the same as_strided": (lambda x: x.as_strided((3,), (1,)), lambda: [torch.ones(3, requires_grad=True)]),
    "written where a mask says": (lambda x, m, v: x.index_put((m,), v), lambda: [torch.ones(5, 5, requires_grad=True), torch.tensor([True, False, True, False, True]), torch.ones(5, requires_grad=True)]),
    "one result is what another was made of": (lambda x: (x.index_select(0, torch.tensor([1, 1])), torch.nan_to_num(x.index_select(0, torch.tensor([1, 1])))), lambda: [torch.ones(3, requires_grad=True)]),
    "transposed in place": (lambda x: (x * 2).transpose_(0, 1).exp(), lambda: [torch.ones(2, 3, requires_grad=True)]),
}


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
@pytest.mark.parametrize("name", [
    pytest.param(n, marks=pytest.mark.no_kernels("a library transforms, and the gradient is a view of what it makes", some=True)) if n == "a kernel's own strides" else n
    for n in AS_EAGER])
def test_as_eager(name):
    fn, make = AS_EAGER[name]
    if name == "the same as_strided":
        expects.compiled("it is a view")
    compiled = vitrify.compile(fn)
    for _ in range(2):
        runs = []
        for f in (fn, compiled):
            torch.manual_seed(0)
            given = make()
            out = f(*given)
            out = out if isinstance(out, tuple) else (out,)
            leaves = [t for t in given if t.requires_grad]
            runs.append([*out, *torch.autograd.grad(out, leaves, [torch.rand(t.shape, dtype=t.dtype) for t in out])])
        for a, b in zip(*runs):
            torch.testing.assert_close(a, b, **(dict(rtol=0, atol=0) if a.dtype is torch.float64 else {}))
            assert a.stride() == b.stride() and a.requires_grad == b.requires_grad
    assert vitrify.counters["eager_calls"] == vitrify.counters["fallbacks"] == 0


@pytest.mark.eager("returns one of several views of what it has written to since")
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
def test_one_of_several_views_of_what_was_written_since():
    """Made around the compiled call it would be made after the write; in eager it has no gradient."""
    def fn(x):
        v = x * 2
        b = v.split(2)[1]
        v[0] = 3
        return v, b
    for f in (fn, vitrify.compile(fn)):
        _, b = f(torch.ones(4, requires_grad=True))
        with pytest.raises(RuntimeError, match="is a view and its base or another view of its base has been modified inplace"):
            b.sum().backward()


def test_an_extremum_is_found_again():
    """Among other work, what it was taken of would be rounded otherwise: no element equals it, and its gradient is not a number."""
    def fn(x):
        v = x.std(0, keepdim=True)
        w = torch.addcmul(x, v, v)
        return w.amax(2), torch.atan2(w, v)
    grads = []
    for f in (fn, vitrify.compile(fn, fullgraph=True)):
        x = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = f(x)
        grads += torch.autograd.grad(out, x, [torch.ones_like(t) for t in out])
    torch.testing.assert_close(*grads)
    assert vitrify.counters["kernels_launched"] > 0


@pytest.mark.eager("returns a detached tensor that gradients come back through")
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
def test_a_detached_tensor_that_is_written_to():
    """It has a history of its own, and the memory of another."""
    def fn(x):
        v = x * 2
        d = v.detach()
        d.copy_(v)
        return v, d
    for f in (fn, vitrify.compile(fn)):
        x = torch.ones(3, requires_grad=True)
        v, d = f(x)
        (g,) = torch.autograd.grad([v, d], x, [torch.ones(3), torch.full((3,), 10.0)])
        assert d.requires_grad and torch.equal(g, torch.full((3,), 22.0))


SPECIAL = {
    "finite": [], "a zero": [0.0], "zeros": [0.0, 0.0], "inf": [float("inf")], "nan": [float("nan")], "inf and a zero": [float("inf"), 0.0],
    "nan and zeros": [float("nan"), 0.0, 0.0], "-inf and nan": [float("-inf"), float("nan")], "ties": [9.0, 9.0],
}
LOOKS = {
    "prod": lambda x: x.prod(), "prod of rows": lambda x: x.prod(1), "prod of columns": lambda x: x.prod(0, keepdim=True), "prod in double": lambda x: x.prod(1, dtype=torch.float64),
    "cumprod": lambda x: x.cumprod(1), "cumprod of columns": lambda x: x.cumprod(0), "cumprod in place": lambda x: x.clone()[1:].cumprod_(1),
    "max": lambda x: x.max(), "min": lambda x: x.min(), "median": lambda x: x.median(), "nanmedian": lambda x: x.nanmedian(),
    "masked_fill": lambda x: x.masked_fill(x.detach() > 1, x[0, 0]),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("name", LOOKS)
def test_a_derivative_that_looks_at_values(name, special):
    """As eager chooses: a quotient where no factor is zero, else the products of the others. In its strides, unless a zero is among the factors."""
    fn = LOOKS[name]
    compiled = vitrify.compile(fn, fullgraph=True)
    made = torch.rand(4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5
    made[0, [1, 3, 4][:len(SPECIAL[special])]] = torch.tensor(SPECIAL[special], dtype=torch.float64)
    for transposed in (False, True):
        if name == "cumprod in place" and transposed:
            continue
        both = []
        for f in (fn, compiled):
            x = (made.t().contiguous().t() if transposed else made.clone()).requires_grad_()
            out = f(x)
            first, = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=special in ("finite", "a zero", "ties"))
            both.append([first])
            if first.requires_grad:
                both[-1] += torch.autograd.grad(first, x, torch.ones_like(first), allow_unused=True)
        for ours, theirs in zip(both[1], both[0]):
            torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-12, atol=1e-12)
        if "zero" not in special:
            assert both[1][0].stride() == both[0][0].stride()
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["fallbacks"] == 0


@pytest.mark.parametrize("fn", [torch.matrix_exp, lambda x: torch.linalg.eigh(x).eigenvalues, lambda x: torch.ormqr(x.detach(), x[0].detach(), x)], ids=["matrix_exp", "eigh", "ormqr"])
def test_formulas_write_where_eagers_do(fn):
    """They ask whether there is a dispatch mode, and would write nothing in place under ours: other strides came of it."""
    expects.compiled("ATen computes all of it")
    x = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = []
    for f in (fn, vitrify.compile(fn, fullgraph=True)):
        given = x.clone().requires_grad_()
        out = f(given)
        tangent = torch.ones_like(out, requires_grad=True)
        first, = torch.autograd.grad(out, given, tangent, create_graph=True)
        grads.append([first, *torch.autograd.grad(first, [given, tangent], torch.ones_like(first), allow_unused=True)])
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)
    assert [g is not None and g.stride() for g in grads[0]] == [g is not None and g.stride() for g in grads[1]]
    assert vitrify.counters["compiled_calls"] > 0 and vitrify.counters["externs_called"] > 0 and vitrify.counters["fallbacks"] == 0


def test_python_in_a_backward_has_its_own_mode_above():
    """Ops of a backward() written in Python are seen by a mode that it puts on, and captured all the same."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Threefold(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 3 if func is torch.ops.aten.mul.Tensor else out

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            with Threefold():
                return g * 2

    def fn(x):
        return Double.apply(x).sin()
    x = torch.arange(4.0).requires_grad_()
    out = vitrify.compile(fn)(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, 6 * (2 * x.detach()).cos())
    assert vitrify.counters["kernels_launched"] > 0 and vitrify.counters["fallbacks"] == 0


@pytest.mark.parametrize("then", [lambda v: v, lambda v: v.narrow(0, 1, 20), lambda v: v.split(16)[1].unflatten(0, (4, -1)), lambda v: v[1:][2:].t()],
                         ids=["itself", "narrow", "split", "views"])
def test_a_view_of_what_was_written_since_is_made_from_the_whole(then):
    """Its history is as_strided of it, as eager's, and so is that of a view of such a view; in what strides the gradients meet comes of that."""
    def fn(x):
        x = x.clone()
        view = x[..., ::2]
        x.neg_()
        return then(view), x.roll(1, 0)
    made = []
    for f in (fn, vitrify.compile(fn, fullgraph=True)):
        x = torch.randn(3, 33, generator=torch.Generator().manual_seed(2)).t().requires_grad_()
        out = f(x)
        grad, = torch.autograd.grad(out, x, [torch.ones_like(t) for t in out])
        history = out[0].grad_fn.name(), [n.name() for n, _ in out[0].grad_fn.next_functions if "Strided" in n.name()]
        made.append((history, out[0].stride(), out[0].storage_offset(), grad.stride(), out[0], grad))
    assert made[0][:4] == made[1][:4]
    torch.testing.assert_close(made[0][4:], made[1][4:])
    assert vitrify.counters["kernels_launched"] > 0


def test_an_error_of_a_second_derivative_is_raised():
    """Eager's formula has no case for a bias without a weight; there was no gradient at all, and nothing raised."""
    errors = []
    for f in (torch.native_layer_norm, vitrify.compile(lambda *a: torch.native_layer_norm(*a), fullgraph=True)):
        x, bias = torch.rand(2, 3, requires_grad=True), torch.rand(3, requires_grad=True)
        out = f(x, (3,), None, bias, 1e-5)[0]
        tangent = torch.ones_like(out, requires_grad=True)
        first = torch.autograd.grad(out, [x, bias], tangent, create_graph=True)
        with pytest.raises(RuntimeError) as caught:
            torch.autograd.grad(first, [x, tangent], [torch.ones_like(g) for g in first], allow_unused=True)
        errors.append(str(caught.value))
        with pytest.raises(RuntimeError):
            torch.autograd.grad(first, x, [torch.ones_like(g) for g in first], create_graph=True)
    assert errors[0] == errors[1]
    assert vitrify.counters["kernels_launched"] + vitrify.counters["externs_called"] > 0


def later_view(view, other):
    return other, view, view[:-1]


@pytest.mark.parametrize("fn", [lambda x: (x.select(1, 0), x.var(1, correction=0).movedim(-3, -2)), lambda x: (x.var(1, correction=0).movedim(-3, -2), x.select(1, 0)),
                                lambda x: (x.mT.unsqueeze(0), torch.nn.functional.layer_norm(x, x.shape[-1:]), x.mT.sin()), lambda x: later_view(x.mT, x.sin().contiguous()),
                                lambda x: later_view((y := x.exp()).mT, y.sin().contiguous())], ids=["before", "after", "between", "in two steps", "of a result"])
def test_gradients_of_an_input_and_of_its_views_meet_in_order(fn):
    """A view of an input is no part of the compiled program; its gradient comes before or after the program's as in eager, whose sum has the strides of the first."""
    grads = []
    for f in (fn, vitrify.compile(fn, fullgraph=True)):
        x = torch.randn(4, 1, 16, 2, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out = f(x)
        grads += torch.autograd.grad(out, x, [torch.ones(t.shape) for t in out])
    torch.testing.assert_close(*grads)
    assert grads[0].stride() == grads[1].stride() and vitrify.counters["kernels_launched"] > 0
