"""Two arguments that are views of one tensor, of other elements each: they share its versions, and the history of what is written. Placeholders do not."""
import expects
import pytest
import torch
import vitrify

REASON = "it writes to one of two views of one tensor, beside gradients"
PROGRAMS = {
    "saved and written": lambda a, b, w: (w * b, a.add_(1.0))[0],
    "written and saved": lambda a, b, w: (a.add_(1.0), w * b)[1],
    "written in no_grad": lambda a, b, w: (w * b, quietly(a))[0],
    "saved where it is written": lambda a, b, w: (a.exp_() * w, b.add_(1))[0],
    "gets a history": lambda a, b, w: (b.add_(w), a * 2)[1],
    "both get one": lambda a, b, w: (a.add_(w), b.add_(w), None)[2],
    "written after": lambda a, b, w: (b.sin() * w, b.mul_(2), a.zero_())[0],
}
PAIRS = {
    "halves": lambda base: (base[:4], base[4:]), "in turn": lambda base: (base[::2], base[1::2]), "detached": lambda base: (base.detach()[:4], base.detach()[4:]),
    "rows": lambda base: base.view(2, 4).unbind(), "of its own": lambda base: (base.data[:4], base.data[4:]),
}


def quietly(a):
    with torch.no_grad():
        a.add_(1)


def run(f, pair, history):
    w = torch.tensor([1.0, 2, 3, 4], requires_grad=True)
    base = torch.linspace(-1, 1, 8, requires_grad=history) * 1
    a, b = PAIRS[pair](base)
    try:
        y = f(a, b, w)
        if y is not None:
            y.sum().backward()
    except RuntimeError as e:
        return [str(e).split(":")[0]]
    return [None if y is None else (y.requires_grad, y.detach()), w.grad, a.requires_grad, b.requires_grad, a.detach(), b.detach(), a._version, b._version]


@pytest.mark.parametrize("history", [False, True], ids=["", "with a history"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_writes(name, pair, history):
    expects.eager(REASON, "a leaf Variable that requires grad", "views and is being modified inplace", "output of a function that returns multiple views",
                  "it writes what gradients follow", "modified by an inplace operation", "a view that needs gradients, without them", some=True)
    expects.no_kernels("what eager refuses")
    f = vitrify.compile(PROGRAMS[name])
    for _ in range(2):
        ours, eager = run(f, pair, history), run(PROGRAMS[name], pair, history)
        assert len(ours) == len(eager)
        for a, b in zip(ours, eager):
            assert type(a) is type(b)
            torch.testing.assert_close(a, b) if isinstance(a, (torch.Tensor, tuple)) else None
            assert isinstance(a, (torch.Tensor, tuple)) or a == b


def test_memory_alone_is_no_matter():  # as parameters that lie in one flat tensor
    flat = torch.linspace(-1, 1, 8)

    def f(a, b, w):
        y = a * w * b.detach()
        with torch.no_grad():
            b.mul_(0.5)
        return y.detach(), w.sin()
    compiled = vitrify.compile(f, fullgraph=True)
    for g in (compiled, f):
        w = torch.ones(4, requires_grad=True)
        a, b = torch.empty(0), torch.empty(0)
        a.data, b.data = flat.clone()[:4], flat.clone()[4:]
        g(a, b, w)[1].sum().backward()
        torch.testing.assert_close(w.grad, torch.ones(4).cos())


def test_what_is_only_read():
    def f(a, b, w, c):
        c.add_(1)
        return (a * w + b.sin()).exp()
    compiled = vitrify.compile(f, fullgraph=True)
    results = []
    for g in (compiled, f):
        base, c = torch.linspace(-1, 1, 8, requires_grad=True), torch.zeros(4)
        w = torch.ones(4, requires_grad=True)
        g(base[:4], base[4:], w, c).sum().backward()
        results.append((base.grad, w.grad, c))
    torch.testing.assert_close(*results)


@pytest.mark.eager("it writes to one of two views of one tensor, beside gradients")
def test_found_beside_an_argument():
    base = torch.zeros(8)
    found = base[:4]

    def f(b, w):
        y = w * found
        b.add_(1.0)
        return y
    expects.no_kernels("what eager refuses")
    for g in (f, vitrify.compile(f)):
        w = torch.ones(4, requires_grad=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            g(base[4:], w).sum().backward()


@pytest.mark.parametrize("view", [lambda t: t[2:6], lambda t: t.view(2, 4)[1], lambda t: t[:4]])
@pytest.mark.parametrize("detach", [lambda h: h.detach_(), torch.detach_])
def test_a_view_is_not_detached(view, detach):
    def f(h, w):
        h.mul_(w)
        detach(h)
        return w * 2
    compiled = vitrify.compile(f)
    w = torch.ones(4, requires_grad=True)
    own = torch.ones(4)
    compiled(own, w).sum().backward()
    assert not own.requires_grad
    for g in (f, compiled):
        h = view(torch.zeros(8))
        with pytest.raises(RuntimeError, match="Can't detach views in-place"):
            g(h, w)
        assert h.requires_grad
