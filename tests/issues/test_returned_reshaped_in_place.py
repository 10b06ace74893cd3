"""A result that the program reshapes in place (unsqueeze_, t_) is a tensor of its own, and what shares its memory is a view of it: it came back as a view of a tensor
that nobody was given, which detach_() and writes that need gradients refused."""
import expects
import pytest
import torch
import vitrify

RESHAPE = {
    "unsqueeze_": lambda y: y.unsqueeze_(0), "last": lambda y: y.unsqueeze_(-1), "squeeze_": lambda y: y.squeeze_(1), "t_": lambda y: y.squeeze_(1).t_(), "transpose_": lambda y: y.transpose_(0, 2),
    "there and back": lambda y: y.transpose_(0, 2).transpose_(0, 2), "and written": lambda y: y.transpose_(0, 2).mul_(2),
}
OTHER = {
    "detach": lambda y: y.detach(), "data": lambda y: y.data, "row": lambda y: y[0], "view_as": lambda y: y.view_as(y), "chunk": lambda y: y.chunk(2, -1)[0], "transposed": lambda y: y.transpose(0, 1), "every second": lambda y: y[..., ::2],
    "as_strided": lambda y: y.as_strided((2,), (1,)), "bits": lambda y: y.view(torch.int32),
}


def told(f, mode):
    with mode():
        out = f(torch.arange(6.0).view(2, 1, 3))
    version = lambda t: 0 if t.is_inference() else t._version  # noqa: E731
    before = [version(t) for t in out]
    told = [(t.tolist(), t.stride(), t.storage_offset(), t._is_view(), t._base is None or (t._base.shape, [t._base is o for o in out])) for t in out]

    def tries(run):
        try:
            run()
        except RuntimeError as e:
            told.append(str(e)[:60])
    with torch.no_grad():
        tries(lambda: out[0].add_(1))
        tries(lambda: out[1].mul_(2))
    told += [(t.tolist(), version(t) - v) for t, v in zip(out, before)]
    for t in out:
        tries(t.detach_)
    tries(lambda: out[0].mul_(torch.ones(1, requires_grad=True)))
    return told + [t.requires_grad for t in out]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("reshape", RESHAPE)
def test_what_shares_its_memory(reshape, other, mode):
    for when in ("before", "after", "between"):
        for returned in (lambda y, a: (y, a), lambda y, a: (a, y, a[..., :1])):
            def f(x):
                y = x * 2
                if when == "before":  # noqa: B023
                    a = OTHER[other](y)
                RESHAPE[reshape](y)
                if when != "before":  # noqa: B023
                    a = OTHER[other](y)
                if when == "between":  # noqa: B023
                    y.transpose_(0, 1)
                return returned(y, a)  # noqa: B023
            try:
                theirs = told(f, mode)
            except (RuntimeError, IndexError):  # there is no such view
                continue
            compiled = vitrify.compile(f, fullgraph=True)
            assert told(compiled, mode) == theirs
            assert told(compiled, mode) == theirs


APART = {
    "detached": lambda x: x.detach().unsqueeze_(0), "data": lambda x: x.data.transpose_(0, 2), "beside it": lambda x: (lambda y: (y, y.detach().squeeze_(1).t_()))(x * 2), "bits": lambda x: (lambda a: (a.transpose_(0, 2), a[0]))((x * 2).view(torch.int32)),
    "views of it": lambda x: (lambda a: (a.transpose_(0, 2), a[0], a[1])[1:])(x.data), "of a view": lambda x: (lambda y: (y, y[0].detach().t_()))(x * 2), "twice": lambda x: (x * 2).detach().squeeze_(1).detach().t_(), "a view, by content": lambda x: (lambda a: (a.unsqueeze_(0), a[0]))(x[x > 2]),
    "indices": lambda x: (lambda a: (a.t_(), a.detach()))(x.nonzero()),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", APART)
def test_what_is_apart_from_autograd(name, mode, dynamic):
    if name in ("detached", "data", "views of it", "a view, by content", "indices"):
        expects.no_kernels("nothing but views and library calls")
    f = lambda x: (lambda out: out if isinstance(out, tuple) else (out, out[:1]))(APART[name](x))  # noqa: E731
    compiled = vitrify.compile(f, dynamic=dynamic, fullgraph=True)
    for _ in range(2):
        assert seen(compiled, mode) == seen(f, mode)


FROM_BEFORE = {
    "a row": lambda x: (lambda a: (lambda b: (a.transpose_(0, 2), b))(a[0]))(x.data), "a row of one made here": lambda x: (lambda a: (lambda b: (a.transpose_(0, 2), b))(a[0]))((x * 2).detach()),
    "detached": lambda x: (lambda a: (lambda b: (a.transpose_(0, 2), b))(a.detach()))(x.data), "the last": lambda x: (lambda a: (lambda b: (a.squeeze_(1), b))(a.transpose(0, 1)))((x * 2).data),
    "before and after": lambda x: (lambda a: (lambda b: (a.unsqueeze_(0), b))(a[0]))(x.detach())[::-1],
}


@pytest.mark.eager("returns what it has detached and reshaped in place, and a view of that from before")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", FROM_BEFORE)
def test_views_from_before(name, mode):
    f = FROM_BEFORE[name]

    def counted(f):
        out = f(torch.arange(6.0).view(2, 1, 3))
        before = [t._version for t in out]
        out[1].add_(1)
        return [t._version - v for t, v in zip(out, before)]
    compiled = vitrify.compile(f)
    for _ in range(2):
        assert seen(compiled, mode) == seen(f, mode) and counted(compiled) == counted(f)


def seen(f, mode):
    x = torch.arange(6.0).view(2, 1, 3)
    with mode():
        out = f(x)
    bases = [(t._is_view(), None if t._base is None else (t._base.shape, [t._base is o for o in (*out, x)])) for t in out]
    told = [(t.tolist(), t.stride(), t.storage_offset()) for t in out] + (bases if mode is not torch.inference_mode else [])

    def tries(run):
        try:
            run()
        except RuntimeError as e:
            told.append(str(e)[:60])
    for t in out:
        if not t.is_inference():
            tries(t.detach_)
    if out[0].is_floating_point() and not out[0].is_inference():
        tries(lambda: out[0].mul_(torch.ones(1, requires_grad=True)))
    return told + [t.requires_grad for t in out]


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("other", ["detach", "row", "view_as", "chunk"])
@pytest.mark.parametrize("reshape", RESHAPE)
def test_any_sizes(reshape, other, dynamic):
    def f(x):
        y = x * 2
        RESHAPE[reshape](y)
        return y, OTHER[other](y)
    compiled = vitrify.compile(f, dynamic=dynamic, fullgraph=True)
    for n in (2, 3, 4, 2):
        for g in (f, compiled):
            with torch.no_grad():
                out = g(torch.arange(3.0 * n).view(n, 1, 3))
            made = [[t.tolist() for t in out], [t.stride() for t in out], out[0]._is_view(), out[0]._base is None, out[1]._base is out[0]]
            out[0].detach_()
            made.append(out[0].mul_(torch.ones(1, requires_grad=True)).requires_grad)
            if g is f:
                theirs = made
        assert made == theirs


LARGER = {
    "a part, in place": lambda x: (x * 2).as_strided_((2,), (1,), 1), "with gaps": lambda x: (lambda y: (y.as_strided_((2,), (2,)), y[0]))(x * 2), "shrunk": lambda x: (x * 2).resize_(2), "shrunk, as": lambda x: (x * 2).resize_as_(x[:1]), "out=": lambda x: torch.add(x[0], 1, out=torch.zeros(6)),
}


@pytest.mark.eager("returns a part of memory that was resized", "returns a tensor that it makes part of its memory", some=True)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("name", LARGER)
def test_memory_that_is_larger_than_the_result(name, mode):
    """What is in front of a result in its memory, and behind it, can be looked at."""
    found = []
    for f in (LARGER[name], vitrify.compile(LARGER[name])):
        with mode():
            out = f(torch.arange(6.0).view(2, 1, 3))
            out = out[0] if isinstance(out, tuple) else out
            found.append((out.tolist(), out.stride(), out.storage_offset(), out.untyped_storage().nbytes(), out._is_view() and out._base.shape, out.as_strided((out.untyped_storage().nbytes() // 4,), (1,), 0).tolist()))
    assert found[0] == found[1]
