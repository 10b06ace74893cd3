"""What a custom backward reads, and the forward does not, or what it gives no gradient: it had none to second order either, and when it was written or replaced in between, eager's backward read what it is by then."""
import pytest
import torch
import vitrify

ALONE, NO_GRADIENT = "in its backward alone", "in a backward of its own that gives it no gradient"


def scaling(by, saved=False):
    class Scales(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w=None):
            if saved:
                ctx.save_for_backward(x, w)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            w = ctx.saved_tensors[1] if saved else by()
            return (grad * w, None) if saved else grad * w
    return Scales.apply


def leaf():
    return torch.arange(1.0, 5).requires_grad_()


@pytest.mark.eager(ALONE, NO_GRADIENT, "no op of it reads", some=True)
@pytest.mark.parametrize("kind", ["closure", "saved", "another result"])
def test_gradients_of_second_order_come_to_what_it_reads(kind):
    told = []
    for make in (vitrify.compile, lambda f: f):
        w, x = leaf(), leaf()
        scale = scaling(lambda w=w: w, saved=kind == "saved")
        f = make({"closure": lambda x: scale(x), "saved": lambda x: scale(x, w), "another result": lambda x: (scale(x), (x * w).sum())}[kind])
        for _ in range(2):
            out = f(x)
            first, = torch.autograd.grad(out[0].sum() if kind == "another result" else out.sum(), x, create_graph=True)
            (first * first).sum().backward()
        told.append((first.detach(), w.grad, x.grad))
    assert told[0][1] is not None
    torch.testing.assert_close(*told)


@pytest.mark.eager(ALONE)
@pytest.mark.parametrize("change", ["written", "replaced"])
def test_it_is_what_it_is_by_then(change):
    told = []
    for make in (vitrify.compile, lambda f: f):
        held = {"w": torch.ones(4)}
        scale, grads = scaling(lambda held=held: held["w"]), []
        f = make(lambda x: scale(x).sin())
        for _ in range(3):
            x = leaf()
            out = f(x)
            if change == "written":
                held["w"].mul_(3)
            else:
                held["w"] = held["w"] * 3
            out.sum().backward()
            grads.append(x.grad)
        told.append(grads)
    torch.testing.assert_close(*told)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_how_what_comes_to_it_lies(dynamic):
    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * (2 if grad.is_contiguous() else 3)
    told = []
    for f in (vitrify.compile(lambda x: Looks.apply(x.sin()), dynamic=dynamic), lambda x: Looks.apply(x.sin())):
        grads = []
        for tangent in (torch.ones(2, 3), torch.ones(3, 2).t(), torch.ones(2, 3)):
            x = torch.ones(2, 3, requires_grad=True)
            f(x).backward(tangent)
            grads.append(x.grad)
        told.append(grads)
    torch.testing.assert_close(*told)


SEEN = {
    "whether it is contiguous": lambda g: g * (2 if g.is_contiguous() else 3), "a stride": lambda g: g * (g.stride(0) + 1), "the strides of one like it": lambda g: torch.empty_like(g).fill_(g.stride(1)),
    "a view of it": lambda g: g.view(-1).view(2, 3) * 3, "channels last": lambda g: g * (1 if g.is_contiguous(memory_format=torch.contiguous_format) else 2),
}


def gradients_of(fn, by, tangents):
    grads = []
    for tangent in tangents:
        x = torch.ones(2, 3, requires_grad=True)
        try:
            out = fn(x)
            if tangent is None:
                grads.append(torch.autograd.grad(out.sum(), x)[0]) if by == "grad" else out.sum().backward()
            else:
                grads.append(torch.autograd.grad(out, x, tangent)[0]) if by == "grad" else out.backward(tangent)
        except RuntimeError as e:
            grads.append(str(e))
        else:
            if by == "backward":
                grads.append(x.grad)
    return grads


def own(backward):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return backward(grad)
    return Own.apply


@pytest.mark.parametrize("by", ["backward", "grad"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("seen", SEEN)
def test_what_comes_to_it_expanded(seen, dynamic, by):
    fn, tangents = own(SEEN[seen]), (None, torch.ones(2, 3), torch.ones(3, 2).t(), None, torch.ones(1, 3).expand(2, 3))
    for ours, eager in zip(gradients_of(vitrify.compile(lambda x: fn(x), dynamic=dynamic), by, tangents), gradients_of(fn, by, tangents)):
        if isinstance(eager, str):
            assert ours == eager
        else:
            torch.testing.assert_close(ours, eager)
            assert ours.stride() == eager.stride()


@pytest.mark.eager("too many sizes or layouts")
def test_it_comes_in_more_layouts_than_have_plans():
    fn = own(lambda g: g * (g.stride(0) + 2))
    tangents = [torch.ones(2, 3 + n)[:, :3] for n in range(12)]
    torch.testing.assert_close(gradients_of(vitrify.compile(lambda x: fn(x)), "backward", tangents), gradients_of(fn, "backward", tangents))


@pytest.mark.eager("which calls may not have in common")
@pytest.mark.parametrize("fact", [lambda g: g._version, lambda g: g.storage_offset(), lambda g: g.untyped_storage().nbytes()], ids=["version", "offset", "memory"])
def test_facts_of_what_comes_to_it(fact):
    fn, tangents = own(lambda g: g * fact(g)), [torch.ones(2, 3).add_(1), torch.ones(4, 3)[2:]]
    torch.testing.assert_close(gradients_of(vitrify.compile(lambda x: fn(x)), "backward", tangents), gradients_of(fn, "backward", tangents))


@pytest.mark.eager("whose own backward reads tensors that it was not given", some=True)
@pytest.mark.parametrize("kind", ["closure", "given"])
def test_what_the_backward_of_a_derivative_in_a_backward_reads(kind):
    told = []
    for make in (vitrify.compile, lambda f: f):
        w = leaf().detach()

        class Inner(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, y, w=w):
                ctx.save_for_backward(y)
                return x * y

            @staticmethod
            def backward(ctx, grad):
                return (grad * w, None) if kind == "closure" else (grad * ctx.saved_tensors[0], None)

        class Outer(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x ** 2

            @staticmethod
            def backward(ctx, grad):
                return Inner.apply(grad, ctx.saved_tensors[0])
        f = make(lambda x: Outer.apply(x))
        for _ in range(2):
            x, t = leaf(), leaf()
            first, = torch.autograd.grad(f(x), x, t, create_graph=True)
            told.append((first.detach(), torch.autograd.grad(first.sum(), t)[0]))
    torch.testing.assert_close(told[:2], told[2:])
