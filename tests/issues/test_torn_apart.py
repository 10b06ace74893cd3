"""What has the memory of another tensor, and to autograd is none of its views (unsafe_split, unsafe_chunk, _unsafe_view): returned, it had the history of a view, without
what was written; and _unsafe_view of a temporary had memory of its own."""
import expects
import pytest
import torch
import vitrify

view = torch.ops.aten._unsafe_view
PROGRAMS = {
    "written": lambda x: x.unsafe_chunk(2)[0].mul_(3), "by exp": lambda x: (x * 1).unsafe_chunk(2)[1].exp_(), "both": lambda x: (lambda h: (lambda a: (h, a))(h.unsafe_chunk(2)[0].mul_(3)))(x * 1), "parts": lambda x: x.unsafe_chunk(2),
    "one": lambda x: x.unsafe_split(1)[1], "sizes": lambda x: x.unsafe_split_with_sizes([1, 3])[1].mul_(2), "of a temporary": lambda x: (x * 2).unsafe_chunk(2), "read": lambda x: (lambda p: p[0] * p[1])((x * 2).unsafe_chunk(2)),
    "read after a write": lambda x: (lambda p: p[0].mul_(p[1]) * 2)((x * 2).unsafe_chunk(2)), "viewed": lambda x: (lambda h: (lambda v: (v.mul_(3), h * 2)[1])(view(h, [8])))(x * 1), "viewed, the other": lambda x: (lambda h: (lambda v: (h.mul_(3), v * 2)[1])(view(h, [8])))(x * 1),
    "viewed, alone": lambda x: view(x * 1, [8]).mul_(3), "of an argument": lambda x: view(x, [8]).mul_(3), "both viewed": lambda x: (lambda h: (h, view(h, [8])))(x * 1), "viewed and read": lambda x: view(x * 2, [8]) * 3,
}


@pytest.mark.eager("in the memory of another, by unsafe_split", "has also by _unsafe_view", "memory that has no tensor of its own", some=True)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name, grad):
    if name in ("parts", "one"):
        expects.no_kernels("nothing but views")
    told = []
    for f in (PROGRAMS[name], vitrify.compile(PROGRAMS[name])):
        for _ in range(2):
            x = torch.arange(8.0).view(4, 2)
            given = x.clone().requires_grad_(grad)
            out = f(given * 1 if "argument" in name or name in ("written", "sizes") else given)
            out = out if isinstance(out, tuple) else (out,)
            told.append([*out, *(torch.tensor([t._is_view(), t._base is given]) for t in out)])
            if grad:
                sum((t * 2).sum() for t in out).backward()
                told[-1].append(given.grad)
            with torch.no_grad() if name != "parts" else torch.enable_grad():
                before = [t._version for t in out], given._version
                changed = out[0].mul_(2)
                told[-1] += [changed, torch.tensor([*(t._version - v for t, v in zip(out, before[0])), given._version - before[1]])]
    torch.testing.assert_close(told[2:], told[:2])


F = torch.nn.functional
PRODUCTS = {
    "and a row": lambda x, w: (lambda z: (z, z[0]))(F.linear(x, w)), "rows": lambda x, w: (lambda z: (z[0], z[1]))(F.linear(x, w)), "one in the other": lambda x, w: (lambda z: (z[0], z[0:1]))(F.linear(x, w)),
    "chunks": lambda x, w: F.linear(x, w).chunk(2, -1), "transposed": lambda x, w: (lambda z: (z.transpose(1, 2), z[0]))(torch.matmul(x, w.t())), "einsum": lambda x, w: (lambda z: (z[0], z[1]))(torch.einsum("abc,dc->abd", x, w)),
    "all of it": lambda x, w: (lambda z: (z, z.view(-1)))(F.linear(x, w)), "detached": lambda x, w: (lambda z: (z, z.detach()))(F.linear(x, w)), "written": lambda x, w: (lambda z: (z.relu_(), z[0]))(F.linear(x, w)),
    "heads": lambda x, w: (lambda z: (z[0], z[1]))(F.linear(x, w).view(2, -1, 5, 1).permute(1, 0, 3, 2)),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", PRODUCTS)
def test_views_of_a_product(name, mode, dynamic):
    """linear() and matmul() of three dims end in an _unsafe_view: its views are of it, and have its versions."""
    told = []
    program = lambda x, w: PRODUCTS[name](x * 2, w)  # noqa: E731
    for f in (program, vitrify.compile(program, dynamic=dynamic, fullgraph=True)):
        for n in range(2):
            with mode():
                out = f(torch.ones(2, 3 + n, 4), torch.arange(20.0).view(5, 4))
            version = lambda t: 0 if t.is_inference() else t._version  # noqa: E731
            before = [version(t) for t in out]
            if mode is not torch.inference_mode:
                with torch.no_grad():
                    out[0].add_(1)
            bases = [] if mode is torch.inference_mode else [[t._base is o for o in out] for t in out]
            told.append(([version(t) - v for t, v in zip(out, before)], [t._is_view() for t in out], bases, [t.tolist() for t in out]))
    assert told[2:] == told[:2]


@pytest.mark.eager("writes to a part of an argument, by aten::unsafe_split.Tensor, in inference mode")
def test_parts_of_an_argument_written_in_inference_mode():
    def f(x):
        torch.unsafe_chunk(x, 2, -1)[0][0] = 3
        return x * 1
    compiled = vitrify.compile(f)
    for _ in range(2):
        for g in (f, compiled):
            x = torch.ones(4, 4)
            with torch.inference_mode():
                g(x)
            assert x._version == 1 and x[0].tolist() == [3, 3, 1, 1]


RESHAPED = {
    "rows of the transposed": lambda x: (lambda z: (z, z[0]))(x.t().reshape(-1, 4)), "beams": lambda x: (lambda z: (z, z[0]))(x[:, None].expand(-1, 3, -1).reshape(-1, 4)),
    "without the whole": lambda x: (lambda z: (z[0], z[1:]))(x.t().reshape(-1, 4)), "detached": lambda x: (lambda z: (z, z.detach()))(x.t().reshape(-1, 2, 2)), "split": lambda x: x.t().reshape(-1, 4).split(1),
    "a product": lambda x: (lambda z: (z, z[0]))(F.linear(x.view(2, -1, 4), torch.ones(5, 4, dtype=x.dtype))), "by a vector": lambda x: (lambda z: (z, z[0]))(x.view(2, -1, 4) @ torch.ones(4, dtype=x.dtype)),
    "a batch": lambda x: (lambda z: (z, z[0]))(x.view(2, -1, 4) @ x.view(2, -1, 4).mT),
}


@pytest.mark.eager("returns a part of memory", some=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", RESHAPED)
def test_any_sizes(name, dynamic, dtype):
    """How many elements there are is written in other terms where sizes change."""
    expects.compiled("products and copies may be all there is")
    told = []
    for f in (RESHAPED[name], vitrify.compile(RESHAPED[name], dynamic=dynamic)):
        for sizes in ((4, 8), (8, 12), (12, 4), (4, 8)):
            with torch.no_grad():
                out = f(torch.ones(sizes, dtype=dtype))
                before = [t._version for t in out]
                out[0].add_(1)
            told.append([*(t._version - v for t, v in zip(out, before)), *([t._base is o for o in out] for t in out), *(t.tolist() for t in out)])
    assert told[4:] == told[:4]


@pytest.mark.eager("by _unsafe_view", some=True)
@pytest.mark.parametrize("program", [lambda x: (lambda a: (torch.unsafe_chunk(a, 1)[0], a))(x * 2), lambda x: (lambda a: (a, torch.unsafe_chunk(a, 1)[0]))(x * 2), lambda x: (lambda a: (a, a[0]))(view(x, (2, 2))),
                                     lambda x: (lambda a: (a, a[0]))(view((x * 2).unsafe_split(2)[1], (1, 2)))], ids=["first", "last", "argument", "part"])
def test_which_is_whose_view(program):
    told = []
    for f in (program, vitrify.compile(program)):
        with torch.no_grad():
            out = f(torch.ones(4))
            before = [t._version for t in out]
            out[1].add_(1)
        told.append([*(t._version - v for t, v in zip(out, before)), *([t._base is o for o in out] for t in out), *(t.tolist() for t in out)])
    assert told[0] == told[1]
