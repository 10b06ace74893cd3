"""What autograd takes for no view counts its own writes, but lies in the memory of another: a write to that is seen by what was saved, and raises nothing."""
import pytest
import torch
import vitrify

FNS = {
    "kron": torch.kron,
    "kron and more": lambda a, b: torch.kron(a.sin() + a, b) * torch.kron(a, b),
    "_unsafe_view": lambda a, b: torch.ops.aten._unsafe_view(a, (6,)) * torch.ops.aten._unsafe_view(b, (6,)),
    "unsafe_split": lambda a, b: torch.ops.aten.unsafe_split(a, 1)[0] * b.t()[:1],
    "unsafe_chunk": lambda a, b: torch.unsafe_chunk(a, 2)[1] * b.t()[:1],
    "data": lambda a, b: a.data * b.t(),
    "data and itself": lambda a, b: a.data * a * b.t(),
    "a view of its data": lambda a, b: a.data.view(-1) * b.view(-1),
    "detached": lambda a, b: a.detach() * b.t(),
    "itself": lambda a, b: a * b.t(),
}


@pytest.mark.parametrize("create_graph", [False, True], ids=["", "create_graph"])
@pytest.mark.parametrize("made", [False, True], ids=["leaves", "made"])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("fn", FNS)
def test_written_between_forward_and_backward(fn, which, made, create_graph):
    results = []
    for f in (vitrify.compile(FNS[fn], fullgraph=True), FNS[fn]):
        torch.manual_seed(0)
        leaves = [torch.rand(2, 3, requires_grad=True), torch.rand(3, 2, requires_grad=True)]
        args = [t * 2 for t in leaves] if made else leaves
        out = f(*args)
        with torch.no_grad():
            args[which].mul_(3)
        try:
            first = torch.autograd.grad(out.sum(), leaves, create_graph=create_graph, allow_unused=True)
            results.append([t if t is None else t.detach() for t in first])
            if create_graph:
                total = sum(t.square().sum() for t in first if t is not None)
                results[-1] += torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else []
        except RuntimeError as e:
            results.append(str(e).partition(": [")[0])
    if isinstance(results[1], str):
        assert results[0] == results[1]
    else:
        torch.testing.assert_close(*results)


def test_written_by_the_program():
    def fn(a, b):
        out = torch.kron(a, b)
        with torch.no_grad():
            a.mul_(3)
        return out
    results = []
    for f in (vitrify.compile(fn), fn):
        a, b = torch.ones(2, 3, requires_grad=True), torch.ones(3, 2, requires_grad=True)
        f(a, b).sum().backward()
        results.append((a.grad, b.grad, a.detach()))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("lies", [lambda t: t[:, None].expand(2, 2), lambda t: t.expand(3, 2), lambda t: t.repeat(2, 2)[:, ::2], lambda t: t.repeat(3, 1).t()],
                         ids=["expanded", "expanded in front", "with gaps", "transposed"])
@pytest.mark.parametrize("seen", [lambda v: torch.kron(v, v), lambda v: torch.ops.aten._unsafe_view(v, (v.shape[0], 1, v.shape[1])).exp()], ids=["kron", "_unsafe_view"])
def test_of_what_the_program_made(lies, seen):
    def fn(a, b):
        v = lies(a * 2)
        return v, seen(v) * b
    results = []
    for f in (vitrify.compile(fn, fullgraph=True), fn):
        a, b = torch.tensor([1., 2.], requires_grad=True), torch.tensor(3., requires_grad=True)
        out = f(a, b)
        sum(t.square().sum() for t in out).backward()
        results.append((out, a.grad, b.grad))
    torch.testing.assert_close(*results)
    assert [t.stride() for t in results[0][0]] == [t.stride() for t in results[1][0]]
