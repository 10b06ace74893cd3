"""A Function's backward that reads a weight by its name, or as an attribute of its ctx, beside what it has saved: nobody looks at that weight's version."""
import expects
import pytest
import torch
import vitrify

W = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)


class ByName(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * x.exp() * W


class AsAttribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.w = W
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * x.cos() * ctx.w


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, W)
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * x.exp() * W * w


class ASavedView(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, W[1:].detach())
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        x, part = ctx.saved_tensors
        return g * x.exp() * W * part.sum()


PROGRAMS = {
    "sum": lambda f, x: f(x + W), "product": lambda f, x: f(x * W), "detached": lambda f, x: f(x * 1 + W.detach()), "met behind it": lambda f, x: f(x * 2) * W.detach(),
    "computed once more": lambda f, x: f((x + W) * 1),
}
WRITES = {"op": lambda: torch.no_grad()(W.add_)(1.0), "data": lambda: W.data.add_(1.0), "nothing": lambda: None}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("function", [ByName, AsAttribute, Saved, ASavedView])
@pytest.mark.parametrize("program", PROGRAMS)
def test_written_in_between(program, function, write):
    if program in ("detached", "met behind it"):
        expects.eager("in a backward of its own that gives it no gradient")
    told = []
    for make in (vitrify.compile, lambda f: f):
        f, seen = make(lambda x: PROGRAMS[program](function.apply, x)), []
        for _ in range(3):
            W.data.copy_(torch.tensor([0.5, 1.0, 2.0]))
            W.grad, x = None, torch.full((2, 3), 0.75, dtype=torch.float64, requires_grad=True)
            y = f(x)
            WRITES[write]()
            try:
                y.sum().backward()
                seen.append((x.grad.tolist(), None if W.grad is None else W.grad.tolist()))
            except RuntimeError as e:
                seen.append(str(e).partition(": [torch")[0])
        told.append(seen)
    W.grad = None
    for a, b in zip(*told, strict=True):
        assert isinstance(a, str) == isinstance(b, str) and (a == b if isinstance(a, str) else True)
        if not isinstance(a, str):
            torch.testing.assert_close(torch.tensor(a[0]), torch.tensor(b[0]))
            assert (a[1] is None) == (b[1] is None)
            if a[1] is not None:
                torch.testing.assert_close(torch.tensor(a[1]), torch.tensor(b[1]))


H = torch.ones(3)


class SavesByName(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(H)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        h, = ctx.saved_tensors
        return g * 2


@pytest.mark.parametrize("write", [False, True])
def test_what_it_saves_and_no_op_reads(write):
    """No op read it, so it was no input, and nobody looked at its version."""
    said = []
    for make in (vitrify.compile, lambda f: f):
        f = make(lambda x: SavesByName.apply(x * 3).sin())
        for _ in range(2):
            x = torch.ones(3, requires_grad=True)
            y = f(x).sum()
            if write:
                H.add_(1)
            try:
                y.backward()
                said.append(x.grad.tolist())
            except RuntimeError as e:
                said.append(str(e).partition(" is at version")[0])
    assert said[:2] == said[2:] and isinstance(said[0], str) == write


class Scales(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, as_attribute):
        ctx.w = W if as_attribute else None
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g * (W if ctx.w is None else ctx.w), None


@pytest.mark.eager("in a backward of its own that gives it no gradient")
@pytest.mark.parametrize("as_attribute", [False, True])
@pytest.mark.parametrize("write", [lambda: torch.no_grad()(W.mul_)(1.5), lambda: W.data.mul_(1.5), lambda: W.detach().mul_(1.5)], ids=["op", "data", "detached"])
def test_what_the_program_writes_has_a_gradient_of_second_order(write, as_attribute):
    told = []
    for make in (vitrify.compile, lambda f: f):
        W.data.copy_(torch.tensor([0.5, 1.0, 2.0]))
        f = make(lambda x: (Scales.apply(x, as_attribute), write())[0])
        for _ in range(2):
            x = torch.ones(3, dtype=torch.float64, requires_grad=True)
            g, = torch.autograd.grad(f(x).sum(), x, create_graph=True)
            told.append([g.tolist(), torch.autograd.grad(g.square().sum(), W)[0].tolist()])
    assert told[:2] == told[2:]


class WritesBack(torch.autograd.Function):
    how = None

    @staticmethod
    def forward(ctx, x, q):
        ctx.save_for_backward(q)
        return x * q

    @staticmethod
    def backward(ctx, g):
        q, = ctx.saved_tensors
        WritesBack.how(q)
        return g * q, None


@pytest.mark.eager("writes in a backward", some=True)
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("how", [lambda q: q.data.add_(1), lambda q: q.detach().mul_(2), lambda q: torch.no_grad()(q.add_)(1), lambda q: q.data.zero_().add_(3)], ids=["data", "detached", "counted", "filled"])
def test_it_writes_to_what_the_program_has_made(how, create_graph):
    """The next backward of the call found it as it was, and one of second order was written twice."""
    said = []
    for make in (vitrify.compile, lambda f: f):
        WritesBack.how = how
        f = make(lambda x, b: WritesBack.apply(x, b * 2).sum())
        for _ in range(2):
            x = torch.ones(3, requires_grad=True)
            y = f(x, torch.ones(3))
            for _ in range(2):
                try:
                    said.append(torch.autograd.grad(y, x, retain_graph=True, create_graph=create_graph)[0].tolist())
                except RuntimeError as e:
                    said.append(str(e).partition(" is at version")[0])
    assert said[:4] == said[4:]


def test_a_view_that_begins_to_need_gradients():
    """A view of a leaf needs one and has no place for it: the process ended."""
    told = []
    for make in (vitrify.compile, lambda f: f):
        w = torch.ones(3, dtype=torch.float64)
        v = w.view(3)

        class ByView(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1.5

            @staticmethod
            def backward(ctx, g):
                return g * v  # noqa: B023
        f = make(lambda x: torch.autograd.grad(ByView.apply(x).square().sum(), x, create_graph=True)[0])  # noqa: B023
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        y = f(x)
        w.requires_grad_()
        told.append(torch.autograd.grad(y.square().sum(), [x], create_graph=True)[0].tolist())
    assert told[0] == told[1]
