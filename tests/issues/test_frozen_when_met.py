"""A program that freezes a weight, uses it, and uses it again unfrozen, as a step of a GAN does with its discriminator: a weight that it met frozen had no gradient."""
import expects
import pytest
import torch
import vitrify
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

USES = {"an op": lambda w, x: (x * w).sum(), "without gradients": lambda w, x: torch.no_grad()(lambda: (w * 2).sum())(), "detached": lambda w, x: w.detach().sin().sum(), "a view": lambda w, x: (x * w[1:2]).sum()}


def toggled(w, state, use, x):
    w.requires_grad_(state)
    y = USES[use](w, x)
    w.requires_grad_(True)
    return y


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("order", ["frozen, unfrozen", "unfrozen, frozen", "frozen, unfrozen, frozen, unfrozen", "unfrozen, frozen, unfrozen"])
def test_orders(order, use):
    def told(compile):
        w, seen = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True), []

        def program(x):
            y = x.sum()
            for state in order.split(", "):
                y = y * toggled(w, state == "unfrozen", use if state == "frozen" else "an op", x)
            return y
        f = compile(program)
        for k in range(3):
            x = torch.full((3,), 0.5 + k, dtype=torch.float64, requires_grad=True)
            w.grad = None
            y = f(x)
            dx, dw = torch.autograd.grad(y, (x, w), create_graph=True)
            ddx, = torch.autograd.grad(dw.sum(), x, retain_graph=True)
            y.backward()
            seen.append((y.detach(), x.grad, w.grad, dx.detach(), dw.detach(), ddx))
        return seen
    torch.testing.assert_close(told(vitrify.compile), told(lambda f: f))


@pytest.mark.parametrize("of", ["parameters", "module"])
def test_a_step_of_two_networks(of):
    def make():
        torch.manual_seed(0)
        return nn.ModuleDict({"maker": nn.Linear(2, 3), "judge": nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))}).double()

    def freeze(judge, state):
        if of == "module":
            judge.requires_grad_(state)
        else:
            for p in judge.parameters():
                p.requires_grad_(state)

    def told(compile):
        nets, seen = make(), []
        maker, judge = nets["maker"], nets["judge"]

        def loss(z, x):
            freeze(judge, False)
            made = maker(z)
            cheats = -judge(made).mean()
            freeze(judge, True)
            return cheats + judge(made.detach()).mean() - judge(x).mean()
        f, optimizer = compile(loss), torch.optim.SGD(nets.parameters(), lr=0.1)
        for k in range(4):
            optimizer.zero_grad()
            f(torch.full((2 + k % 2, 2), 0.5).double(), torch.full((3, 3), 1.0).double()).backward()
            seen += [p.grad.clone() for p in nets.parameters()]
            optimizer.step()
        return seen
    torch.testing.assert_close(told(vitrify.compile), told(lambda f: f))


ALIASES = {"found, given": lambda w, b, x: (w.requires_grad_(False), x * b, w.requires_grad_(True))[1], "given, found": lambda w, b, x: (b.requires_grad_(False), x * w, b.requires_grad_(True))[1],
           "read": lambda w, b, x: (w.requires_grad_(False), x * (2.0 if b.requires_grad else 3.0) + (x * w).detach(), w.requires_grad_(True))[1],
           "set": lambda w, b, x: (setattr(w, "requires_grad", False), x * b, setattr(w, "requires_grad", True))[1], "met before": lambda w, b, x: (w * 2, w.requires_grad_(False), x * b, w.requires_grad_(True))[2]}


@pytest.mark.eager("an argument that it also reaches by itself")
@pytest.mark.parametrize("how", ALIASES)
def test_a_weight_that_is_an_argument_too(how):
    """The tensor and its placeholder had a requires_grad each."""
    def told(compile):
        w, seen = torch.ones(3, requires_grad=True), []
        f = compile(lambda x, b: ALIASES[how](w, b, x))
        for k in range(3):
            w.grad = None
            y = f(torch.full((3,), 1.0 + k, requires_grad=True), w)
            y.sum().backward()
            seen.append((y.tolist(), y.requires_grad, None if w.grad is None else w.grad.tolist()))
        return seen
    assert told(vitrify.compile) == told(lambda f: f)


@pytest.mark.eager("an argument that it also reaches by itself", some=True)
@pytest.mark.parametrize("order", ["vw", "vwvw", "wv"])
@pytest.mark.parametrize("how", [*ALIASES, "asked of what it finds"])
def test_a_weight_that_is_an_argument_of_some_calls(how, order):
    """A plan of calls that are given another tensor served the one that is given the weight."""
    program = ALIASES.get(how, lambda w, b, x: (b.requires_grad_(False), x * (2.0 if w.requires_grad else 3.0) + (x * b).detach(), b.requires_grad_(True))[1])

    def told(compile):
        w, v, seen = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True), []
        f = compile(lambda x, b: program(w, b, x))
        for k, which in enumerate(order):
            w.grad = v.grad = None
            y = f(torch.full((3,), 1.0 + k, requires_grad=True), w if which == "w" else v)
            y.sum().backward()
            seen.append((y.tolist(), [None if t.grad is None else t.grad.tolist() for t in (w, v)]))
        return seen
    assert told(vitrify.compile) == told(lambda f: f)


@pytest.mark.parametrize("same", [False, True])
def test_arguments(same):
    def told(compile):
        w, u, seen = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), []

        def program(x, a, b):
            a.requires_grad_(False)
            y = x * b + x.sin() * a
            a.requires_grad_(True)
            return y
        f = compile(program)
        for k in range(3):
            w.grad = u.grad = None
            f(torch.full((3,), 1.0 + k, requires_grad=True), w, w if same else u).sum().backward()
            seen.append([None if t.grad is None else t.grad.tolist() for t in (w, u)])
        return seen
    assert told(vitrify.compile) == told(lambda f: f)


@pytest.mark.eager("freezes or unfreezes a tensor beside a checkpoint", some=True)
@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_frozen_after_a_checkpoint(given, detached):
    """Its function saves other tensors when it computes again."""
    def told(compile):
        w, seen = torch.ones(3), []

        def program(x, b=None):
            b = w if b is None else b
            b.requires_grad_(True)
            y = checkpoint(lambda q: q * b, (x.detach() if detached else x) * 2, use_reentrant=False)
            b.requires_grad_(False)
            return y
        f = compile(program)
        for _ in range(3):
            y = f(torch.ones(2, 3, requires_grad=True), *[torch.ones(3)] * given)
            with pytest.raises(CheckpointError):
                y.sum().backward()
            seen.append(y.tolist())
        return seen
    assert told(vitrify.compile) == told(lambda f: f)


def test_what_a_program_makes_needs_gradients_beside_a_checkpoint():
    def told(compile):
        w, seen = torch.ones(3, requires_grad=True), []

        def program(x):
            y = checkpoint(lambda q: (q * w).sin(), x, use_reentrant=False).sum()
            between = x.detach().requires_grad_()
            g, = torch.autograd.grad((between * w).sin().sum(), between, create_graph=True)
            return y + g.square().sum()
        f = compile(program)
        for k in range(3):
            w.grad = None
            f(torch.full((3,), 1.0 + k)).backward()
            seen.append(w.grad.clone())
        return seen
    torch.testing.assert_close(told(vitrify.compile), told(lambda f: f))


READS_IT = {
    "product": lambda x, w: x * w, "matrix": lambda x, w: (x @ w).exp(), "power": lambda x, w: x.abs() ** w, "division": lambda x, w: x / w, "lerp": lambda x, w: torch.lerp(x, x * x, w), "norm": lambda x, w: nn.functional.layer_norm(x, (3,), w[0]),
    "twice": lambda x, w: (x * w).sin() * w, "through a view": lambda x, w: x * x * w.t(),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("how", READS_IT)
def test_frozen_only_where_it_is_read(how, own, given):
    """A penalty through a frozen critic: by the time of the gradient it needs one again, which the second order has and the first does not lead to."""
    def told(compile):
        w, seen = torch.linspace(0.5, 1.5, 9, dtype=torch.float64).view(3, 3).requires_grad_(), []

        def score(x, w):
            w.requires_grad_(False)
            y = READS_IT[how](x, w)
            w.requires_grad_(True)
            return torch.autograd.grad(y.sum(), x, create_graph=True)[0] if own else y
        f = compile(score if given else lambda x: score(x, w))
        for k in range(2):
            x = torch.linspace(1, 2 + k, 9, dtype=torch.float64).view(3, 3).requires_grad_()
            w.grad = None
            g = f(x, w) if given else f(x)
            if not own:
                g, = torch.autograd.grad(g.sin().sum(), x, create_graph=True)
            g.square().sum().backward()
            seen += [g.detach(), x.grad, w.grad]
        return seen
    ours, eager = told(vitrify.compile), told(lambda f: f)
    assert [t is None for t in ours] == [t is None for t in eager]
    torch.testing.assert_close([t for t in ours if t is not None], [t for t in eager if t is not None])


WRITTEN = {"before": lambda x, w: (torch.no_grad()(w.clamp_)(-0.8, 0.8), x * w)[1].sin(), "by its data": lambda x, w: (w.data.clamp_(-0.8, 0.8), x * w)[1].sin(), "after": lambda x, w: ((x * w).sin(), w.data.mul_(0.5))[0]}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("how", WRITTEN)
def test_written_while_it_is_frozen(how, inside, given):
    """Clipped by the program itself. What is frozen around the call is known to need a gradient when it is too late for the call."""
    if inside:
        expects.eager("and writes to it" if given else "writes to 'w' in a way that gradients must follow, and they read it")
    else:
        expects.eager("a tensor that the program has written or made begins to need gradients")

    def told(compile):
        w = torch.linspace(0.5, 1.5, 3, dtype=torch.float64).requires_grad_()

        def program(x, w):
            if inside:
                w.requires_grad_(False)
            y = WRITTEN[how](x, w)
            if inside:
                w.requires_grad_(True)
            return y
        f, seen = compile(program if given else lambda x: program(x, w)), []
        for _ in range(2):
            w.data.copy_(torch.linspace(0.5, 1.5, 3))
            w.grad, x = None, torch.linspace(1, 2, 3, dtype=torch.float64).requires_grad_()
            w.requires_grad_(inside)
            y = f(x, w) if given else f(x)
            w.requires_grad_(True)
            try:
                g, = torch.autograd.grad(y.sum(), x, create_graph=True)
                g.square().sum().backward()
                seen.append((g.detach(), x.grad, w.grad))
            except RuntimeError as e:
                assert "begins to need gradients" in str(e) and not inside
                seen.append(None)
        return seen
    ours, eager = told(vitrify.compile), told(lambda f: f)
    assert (ours[0] is None) == (not inside)
    for a, b in zip(ours, eager, strict=True):
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.eager("freezes or unfreezes a view, which needs gradients with its base", "it changes the requires_grad of a tensor", some=True)
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
@pytest.mark.parametrize("given", [True, False])
def test_a_view_of_what_needs_gradients(given):
    """It needs what its base does, whatever is set of itself."""
    def told(compile):
        base, seen = torch.ones(2, 3), []
        view = base[:1]

        def program(x, b=None):
            x.requires_grad_(False)
            y = x.sin() * 2
            x.requires_grad_()
            return y
        f = compile(program)
        for x in (base, view, view):
            y = f(x, base) if given else f(x)
            seen.append((y.requires_grad, y.is_leaf, x.requires_grad))
        return seen
    assert told(vitrify.compile) == told(lambda f: f)


@pytest.mark.eager("freezes or unfreezes a view, which needs gradients with its base")
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
def test_a_view_of_a_weight_made_without_gradients():
    """It needs gradients with its base, and gets none of its own until it is told to need them itself."""
    def program(x):
        x.requires_grad_()
        return x.detach() * 2

    def told(compile):
        w, f = nn.Parameter(torch.ones(3, 3)), compile(program)
        with torch.no_grad():
            view = w[1:]
        f(view), f(view)
        (view * 2).sum().backward()
        return view.grad, w.grad
    assert str(told(vitrify.compile)) == str(told(lambda f: f))


def test_a_part_of_an_activation():
    """It has a history, and needs gradients already."""
    def program(x):
        x.requires_grad_()
        return x.sin() * 2
    compiled = vitrify.compile(program)
    for _ in range(2):
        w, told = torch.ones(3, 3, requires_grad=True), []
        for f in (program, compiled):
            told.append(torch.autograd.grad(f((w * 2)[1:]).sum(), w)[0])
        torch.testing.assert_close(*told)
