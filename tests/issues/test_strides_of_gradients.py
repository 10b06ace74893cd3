"""Gradients lie as eager's do: by the kernel that it runs, and by which of several comes first, to which the others are added in place."""
import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify


def odd(t):
    """Dims of one element have a stride of their own."""
    return torch.empty_strided(t.shape, [777 if n == 1 else s for n, s in zip(t.shape, t.stride())]).copy_(t)


def swapped(t):
    return t.transpose(0, -1).contiguous().transpose(0, -1)


def check(f, x, tangents=None, create_graph=False):
    seen = []
    for g in (f, vitrify.compile(f)):
        leaf = x.detach().requires_grad_()
        out = [t for t in g(leaf) if t.requires_grad]
        if tangents:
            grad, = torch.autograd.grad(out, leaf, [tangents(t) for t in out], create_graph=create_graph)
        else:
            grad, = torch.autograd.grad(sum((t * (i + 1)).sum() for i, t in enumerate(out)), leaf, create_graph=create_graph)
        seen.append([grad, *out])
    torch.testing.assert_close(*seen)
    assert [t.stride() for t in seen[0]] == [t.stride() for t in seen[1]]


@pytest.mark.parametrize("f", [F.silu, F.mish], ids=["silu", "mish"])
def test_composites_with_a_kernel_of_their_own(f):
    """ATen has a formula for these gradients as well, whose result lies otherwise."""
    check(lambda x: (f(x),), torch.rand(6, 2)[::2, :1], lambda t: odd(torch.ones(3, 1)))


def test_native_channel_shuffle():
    x = torch.rand(2, 4, 3, 5).to(memory_format=torch.channels_last)
    made = [g(x) for g in (lambda x: torch.native_channel_shuffle(x, 2) + 1, vitrify.compile(lambda x: torch.native_channel_shuffle(x, 2) + 1))]
    torch.testing.assert_close(*made)
    assert made[0].stride() == made[1].stride()


IMAGES = [((1, 4, 6, 1), (1, 1, 4, 24), (24, 6, 1, 1)), ((1, 4, 6, 2), (8, 1, 8, 4), (48, 12, 2, 1)), ((2, 4, 6, 1), (24, 1, 4, 48), (24, 6, 1, 1)),
          ((2, 1, 3, 3), (9, 1, 3, 1), (9, 1, 3, 1)), ((2, 4, 1, 1), (4, 1, 4, 4), (4, 1, 4, 4)), ((2, 4, 3, 1), (12, 1, 4, 4), (12, 3, 1, 1)),
          ((1, 4, 2, 3, 1), (1, 1, 12, 4, 24), (24, 6, 3, 1, 1))]


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("shape, strides, of_tangent", IMAGES, ids=str)
def test_batch_norm_of_images_with_dims_of_one_element(shape, strides, of_tangent, training):
    """Eager's kernel asks in which order memory lies, not which format its strides suggest."""
    c = shape[1]
    x, g = (torch.empty_strided(shape, s).copy_(torch.randn(shape)) for s in (strides, of_tangent))
    check(lambda x: (F.batch_norm(x, torch.zeros(c), torch.ones(c), torch.ones(c), torch.zeros(c), training) * 1,), x, lambda t: torch.empty_strided(shape, of_tangent).copy_(g))

    def backward(g, x):
        return torch.ops.aten.native_batch_norm_backward(g, x, torch.ones(c), torch.zeros(c), torch.ones(c), torch.zeros(c), torch.ones(c), training, 1e-5, [True] * 3)[0]
    assert vitrify.compile(backward)(g, x).stride() == backward(g, x).stride()


PRODUCTS = {"prod": lambda x: x.prod(), "prod of a dim": lambda x: x.prod(0), "kept": lambda x: x.prod(-1, keepdim=True), "cumprod": lambda x: x.cumprod(0)}


@pytest.mark.parametrize("shape", [(1, 2, 33, 1), (2, 1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("op", PRODUCTS)
def test_products(op, shape):
    """Zeros are looked for in the graph; it is the usual formula that says how the gradient lies."""
    for x in (torch.rand(shape), swapped(torch.rand(shape)), odd(torch.rand(shape))):
        check(lambda x: (PRODUCTS[op](x) * 1,), x, torch.ones_like)
        check(lambda x: (PRODUCTS[op](x) * 1,), x, lambda t: odd(torch.ones(t.shape)))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def test_python_made_the_first():
    """Nobody but its own object holds it: the engine adds to it in place."""
    check(lambda x: (torch.clamp((x * 1).swapaxes(-1, 1), min=Twice.apply(x)),), torch.rand(1, 2, 33, 1))


ORDERS = {
    "made before what is behind another": (lambda x: (lambda a, b: (b, b @ b.mT, a.exp()))(x.t().contiguous().t() * 3, x.sin()), (3, 4)),
    "given late by the first": (lambda x: (lambda a, b: (b, a @ b.mT))(F.silu(x), torch.linalg.solve_triangular(torch.tril(x @ x.mT) + 3 * torch.eye(4), x, upper=False)), (2, 4, 1)),
    "between a result and what follows from it": (lambda x: (lambda a, b: (a, b, torch.linalg.cholesky(a @ a.mT + torch.eye(3)) * 2))(x.mT @ x, torch.atan(x)), (3, 3)),
    "a view between others": (lambda x: (lambda a, b: (a, b, torch.tril(b) * 2))(torch.rot90(x, 1, (0, 1)), x.expand(2, *x.shape)), (7, 1, 4)),
    "a view after one": (lambda x: (torch.rot90(x, 1, (0, 1)), x.expand(2, *x.shape), x.sin()), (7, 1, 4)),
    "by an element of it": (lambda x: (lambda a, b: (a.mT @ a, b, b.exp()))(x[None, ..., -1], torch.linalg.solve_triangular(torch.tril(x @ x.mT) + 3 * torch.eye(5), x, upper=False)), (2, 2, 5, 5)),
}


@pytest.mark.parametrize("layout", [torch.clone, swapped], ids=["contiguous", "swapped"])
@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_several(order, layout):
    f, shape = ORDERS[order]
    check(f, layout(torch.rand(shape)))
    check(f, layout(torch.rand(shape)), torch.ones_like)


def test_convolution_behind_a_result():
    conv = torch.nn.Conv2d(8, 16, 3, padding=1).to(memory_format=torch.channels_last)

    def f(x):
        a = conv(x)
        b = a.expand(2, *a.shape).prod(0)
        x = x * 2
        return a, b.clone(), x
    check(f, torch.rand(2, 8, 10, 7))


def test_added_where_it_came_from_elsewhere():
    """What has come to a result goes on with what is behind it only where nothing shows that it was not added in place."""
    def f(x):
        x = x.clone()
        a = F.leaky_relu(-x, 0.1)
        return x.permute(3, 2, 1, 0), a, a.abs()
    check(f, torch.rand(8, 16, 8, 1))


@pytest.mark.parametrize("make", [lambda: torch.rand(1), lambda: torch.rand(2)[::2], lambda: torch.rand(6, 1)[::2], lambda: torch.rand(7, 1).expand(7, 2)], ids=["one", "sliced", "column", "expanded"])
def test_as_strided_of_itself(make):
    """It views all that its tensor does. Its derivative is not that of an alias: it spreads gradients over elements that share memory."""
    expects.compiled("a view alone")
    x = make()
    check(lambda x: (x.as_strided(x.shape, x.stride()),), x)
    check(lambda x: (x.as_strided(x.shape, x.stride()),), x, lambda t: torch.ones(()).expand(t.shape))


@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 1, 3)], ids=str)
def test_huber_loss_is_made_of_its_input(shape):
    check(lambda x: (F.huber_loss(x, (x * 2).detach(), reduction="none"),), odd(torch.rand(shape)))


def test_negative_likelihood_of_images():
    labels = torch.zeros(2, 3, 1, dtype=torch.int64)
    check(lambda x: (F.nll_loss(x, labels),), odd(torch.rand(2, 4, 3, 1)))


def test_negative_likelihood_of_images_in_another_layout():
    """Eager's kernel refuses them, when gradients come."""
    expects.eager("grad_input must be contiguous")
    labels = torch.zeros(2, 3, 5, dtype=torch.int64)
    for f in (lambda x: F.nll_loss(x, labels), vitrify.compile(lambda x: F.nll_loss(x, labels))):
        loss = f(torch.rand(2, 4, 3, 5).to(memory_format=torch.channels_last).requires_grad_())
        with pytest.raises(RuntimeError, match="grad_input must be contiguous"):
            loss.backward()


@pytest.mark.parametrize("again", [False, True], ids=["once", "create_graph"])
@pytest.mark.parametrize("cloned", [False, True], ids=["input", "its copy"])
def test_order_at_a_node_where_a_part_begins(cloned, again):
    """What is given to it by a node in front came first, though eager's runs after those of the part behind another result: the sum had its strides."""
    def f(x):
        x = x.clone() if cloned else x
        first = x.abs()
        last = torch.round(x.t().reshape(3, 6))
        late = F.hinge_embedding_loss(last, torch.sign(last.detach()))
        return late, F.hinge_embedding_loss(first, torch.sign(first.detach())), torch.floor(late)
    compiled, strides = vitrify.compile(f), []
    for g in (f, compiled, compiled):
        x = torch.arange(-7.0, 11.0).view(3, 6).requires_grad_()
        (grad,) = torch.autograd.grad(sum((i + 1) * t for i, t in enumerate(g(x))), x, create_graph=again)
        strides.append((grad.stride(), grad.tolist()))
    assert strides[0] == strides[1] == strides[2]


@pytest.mark.parametrize("f", [lambda x: x.abs().log(), lambda x: x.abs() * x.t(), lambda x: x.sign() * x.sin() + x.abs()], ids=["log", "times", "sum"])
def test_zeros_leave_what_they_are_added_to_as_it_lies(f):
    """The gradient of a sign is a tensor of zeros without memory: the sum had the strides of one with memory."""
    found = []
    for c in (vitrify.compile(f, fullgraph=True), f):
        torch.manual_seed(0)
        x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
        (g,) = torch.autograd.grad(c(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(g, x, torch.randn(4, 4, dtype=torch.float64).t(), allow_unused=True)[0])
    torch.testing.assert_close(*found)
    assert found[0].stride() == found[1].stride()


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("shape", [(0, 1, 4), (2, 1, 4), (1, 0, 4), (4, 1, 0), (4, 0, 1), (1, 4, 0)], ids=str)
def test_dims_of_one_element_in_any_sizes(shape, dynamic):
    """Where sizes may differ, a gradient of nothing lay as another order of the same strides has it."""
    if 0 in shape:
        expects.no_kernels("nothing is computed")
    f, found = lambda x: F.dropout(x, 0.3) * 2, []
    for g in (f, vitrify.compile(f, dynamic=dynamic, fullgraph=True)):
        seen = []
        for rows in (torch.randn(shape), torch.randn(shape).transpose(0, 2).contiguous().transpose(0, 2)):
            x = torch.randn(shape, requires_grad=True)
            y = g(x)
            y.register_hook(lambda t: seen.append(t.stride()))  # noqa: B023
            seen += [y.stride(), torch.autograd.grad((y * rows).sum(), x, retain_graph=True)[0].stride(), torch.autograd.grad(y.sum(), x)[0].stride()]
        found.append(seen)
    assert found[0] == found[1]
