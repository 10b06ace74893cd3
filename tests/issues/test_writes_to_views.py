"""What a call writes to a view that it is given: gradients come through the view and through its base, whether the base had a gradient before or not."""
import pytest
import torch
import vitrify

WRITES = {
    "times": lambda x, y: y.mul_(x),
    "its sum": lambda x, y: y.mul_(x).sum(),
    "copied": lambda x, y: (y.copy_(x * 3), None)[1],
    "zeroed": lambda x, y: y.mul_(x).zero_(),
    "drawn": lambda x, y: y.add_(x).normal_(),
}


@pytest.mark.parametrize("of", ["a result", "nothing"])
@pytest.mark.parametrize("name", WRITES)
def test_gradients(name, of):
    def outcome(f):
        torch.manual_seed(0)
        leaf = torch.ones(2, 3, requires_grad=of != "nothing")
        base = leaf * 2 if of == "a result" else leaf.clone()
        x, y = torch.full((3,), 2.0, requires_grad=True), base[0]
        out = f(x, y)
        loss = y.sum() + base.square().sum()
        if out is not None:
            loss = loss + out.sum()
        loss.backward()
        return x.grad, leaf.grad, base, y
    torch.testing.assert_close(outcome(vitrify.compile(WRITES[name], fullgraph=True)), outcome(WRITES[name]))


BY_NAME = {"times": lambda a: a.mul_(3.0), "read before": lambda a: ((a * 2).sum(), a.mul_(3.0))[0], "a part": lambda a: (a[1:].mul_(3.0), None)[1]}
PAST = {
    "a part": lambda a: a[1:].mul_(3.0).sum(), "transposed": lambda a: a.t().mul_(2.0).sin(), "in another shape": lambda a: a.unsqueeze(0).mul_(2.0).cos(),
    "with what is read of it": lambda a: (a.t().mul_(2.0), a.sin())[1], "returned": lambda a: a[1:].mul_(2.0), "returned from before": lambda a: (lambda v: (a.mul_(2.0), v)[1])(a[1:]), "twice": lambda a: (a[1:].mul_(2.0), a.mul_(3.0))[0],
    "read by a view from before": lambda a: (lambda v: (a.mul_(2.0), v.cos())[1])(a[1:]), "read by a view from since": lambda a: (a.mul_(2.0), a[1:].cos())[1],
    "by its name first": lambda a: (a.mul_(2.0), a[1:].mul_(3.0).sum())[1],
}
VIEWS = {"of a result": lambda h: h.view(4, 3), "a part": lambda h: h[3:].view(3, 3), "of a view": lambda h: h.view(3, 4).t()}
USES = {
    "nothing": lambda a, o: None, "its gradient": lambda a, o: torch.autograd.grad(o.sum(), a, allow_unused=True, retain_graph=True)[0],
    "both": lambda a, o: torch.autograd.grad((a * a).sum() + o.sum(), a, retain_graph=True)[0],
    "kept": lambda a, o: (a.retain_grad(), o.sum().backward(retain_graph=True), a.grad)[2], "written again": lambda a, o: (a.add_(3.0), None)[1],
}


def same(a, b):
    assert [t is None for t in a] == [t is None for t in b]
    for t, u in zip(a, b, strict=True):
        if t is not None:
            torch.testing.assert_close(t, u)


@pytest.mark.eager("whose gradient someone looks at", some=True)
@pytest.mark.parametrize("looks", ["nobody", "hook", "hook on the way", "kept"])
@pytest.mark.parametrize("name", BY_NAME)
def test_hooks_of_the_view(name, looks):
    """Eager's gradients follow the write to the base, past the view's own node: its hooks ran."""
    def outcome(f):
        leaf = torch.linspace(1, 2, 6, dtype=torch.float64, requires_grad=True)
        between = (leaf * 1).view(2, 3)
        a = between.t()
        if looks == "kept":
            between.retain_grad()
        elif looks != "nobody":
            (a if looks == "hook" else between).register_hook(lambda g: g * 10)
        o = f(a)
        (a.sum() if o is None else a.sum() + o.sum()).backward()
        return leaf.grad, between.grad if looks == "kept" else None
    same(outcome(vitrify.compile(BY_NAME[name])), outcome(BY_NAME[name]))


@pytest.mark.sweep(3)
@pytest.mark.eager("by way of another view", some=True)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", PAST)
def test_what_follows_from_a_write_by_a_view(name, view, use):
    """Eager's gradients of that come from the base, and are none of the argument's own: they were taken for it."""
    def outcome(f):
        leaf = torch.linspace(0.1, 1, 12, dtype=torch.float64, requires_grad=True)
        a = VIEWS[view](leaf * 1)
        o = f(a)
        used = USES[use](a, o)
        (a.sum() if use == "written again" else a.sum() + o.sum()).backward()
        return used, leaf.grad
    same(outcome(vitrify.compile(PAST[name])), outcome(PAST[name]))


@pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")
@pytest.mark.parametrize("name", PAST)
def test_of_no_view(name):
    """What is no view itself is native."""
    def outcome(f):
        leaf = torch.linspace(0.1, 1, 9, dtype=torch.float64, requires_grad=True)
        a = leaf.view(3, 3) * 1
        o = f(a)
        used = torch.autograd.grad(o.sum(), a, allow_unused=True, retain_graph=True)[0]
        (a.sum() + o.sum()).backward()
        return used, leaf.grad
    same(outcome(vitrify.compile(PAST[name], fullgraph=True)), outcome(PAST[name]))


LEAVES = {"a view": lambda t: t, "a tensor": torch.Tensor.clone}
UNDER = {
    "the view": lambda x: (x[0], lambda: x[0].mul_(0.5), lambda v: v * 2), "the leaf": lambda x: (x[0], lambda: x.mul_(0.5), lambda v: v * 2),
    "detached": lambda x: (x.t(), lambda: x.detach().mul_(0.5), torch.sin),
}


@pytest.mark.eager("a view that needs gradients, without them", some=True)
@pytest.mark.parametrize("first", LEAVES)
@pytest.mark.parametrize("name", UNDER)
def test_a_leaf_that_is_a_view_is_written_under_no_grad(name, first):
    """Eager finds the history of its views anew then, at a base that needs no gradients. Other leaves may follow."""
    def f(x):
        view, write, use = UNDER[name](x)
        with torch.no_grad():
            write()
        return use(view), x * 3

    def outcome(g, kind):
        x = LEAVES[kind](torch.linspace(1, 2, 6).view(2, 3)).requires_grad_()
        results = g(x)
        sum(r.sum() for r in results if r.requires_grad).backward()
        return [*results, x, x.grad]
    compiled = vitrify.compile(f)
    for kind in (first, *LEAVES):
        for a, b in zip(outcome(compiled, kind), outcome(f, kind), strict=True):
            torch.testing.assert_close(a, b)


@torch.library.custom_op("views_written::halve", mutates_args=("x",))
def halve(x: torch.Tensor) -> None:
    x.mul_(0.5)


@pytest.mark.eager("a view that needs gradients, without them", some=True)
@pytest.mark.parametrize("kind", LEAVES)
def test_a_custom_op_writes_to_a_leaf(kind):
    def f(x):
        row = x[0]
        halve(row)
        return row * 2, x * 3

    def outcome(g):
        x = LEAVES[kind](torch.linspace(1, 2, 6).view(2, 3)).requires_grad_()
        results = g(x)
        sum(r.sum() for r in results).backward()
        return [*results, x, x.grad]
    for a, b in zip(outcome(vitrify.compile(f)), outcome(f), strict=True):
        torch.testing.assert_close(a, b)


SAVES = {
    "exp": lambda v: v.exp_() * 2, "sigmoid": lambda v: v.sigmoid_().sin(), "masked": lambda v: v.masked_fill_(v > 2, 0.0) * 3, "relu": lambda v: v.relu_() + 1, "times": lambda v: (v.mul_(2), v.sin())[1],
    "twice": lambda v: v.mul_(2).sigmoid_() * 2, "itself too": lambda v: (v.exp_(), v * 2), "two results": lambda v: (v.exp_(), v.sin(), v.cos())[1:], "a part": lambda v: (v.tanh_(), v[1:] * 2)[1],
}
BESIDE = {
    "the base": lambda b, v, out: out.sum() + b.sum(), "the base first": lambda b, v, out: b.sum() + out.sum(), "a part of the base": lambda b, v, out: out.sum() + b[1].sum() + b[2:].sum(),
    "a view from before": lambda b, v, out: out.sum() + b.before.sum() * 2, "the view": lambda b, v, out: out.sum() + v.sum(), "the view and the base": lambda b, v, out: out.sum() + v.sum() + b.square().sum(),
    "a view of the view": lambda b, v, out: out.sum() + v[1:].sum() + b.sum(), "nothing": lambda b, v, out: out.sum(), "the base alone": lambda b, v, out: b.sum(),
}
GIVEN = {"a view": lambda b: b.view(4), "a part": lambda b: b[1:], "of a view": lambda b: b.view(2, 2).view(4)}
HOW = {
    "once": lambda loss, x: torch.autograd.grad(loss, x), "kept": lambda loss, x: (torch.autograd.grad(loss, x, retain_graph=True), torch.autograd.grad(loss, x))[1],
    "again": lambda loss, x: torch.autograd.grad(torch.autograd.grad(loss, x, create_graph=True)[0].sin().sum(), x),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("name", SAVES)
def test_what_follows_from_the_write_and_the_base_are_both_used(name, beside, given, how):
    """The node of the write is come to once, by way of the base's."""
    def outcome(f):
        x = torch.arange(1.0, 5.0, dtype=torch.float64).requires_grad_()
        b = x * 1
        b.before = b[1:]
        v = GIVEN[given](b)
        out = f(v)
        out = out[0].sum() + out[1].exp() if isinstance(out, tuple) else out
        try:
            return HOW[how](BESIDE[beside](b, v, out), x)
        except RuntimeError as e:
            return str(e).partition(" (")[0]
    ours, theirs = outcome(vitrify.compile(SAVES[name], fullgraph=True)), outcome(SAVES[name])
    assert ours == theirs if isinstance(theirs, str) else torch.testing.assert_close(ours, theirs) is None
