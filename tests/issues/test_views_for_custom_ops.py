"""A custom op looks past the edges of a view that it is given, and may keep it: it gets a view of the whole, and nobody else's memory."""
import pytest
import torch
import vitrify

lib = torch.library.Library("views_for_custom_ops", "DEF")
KEPT = []


def look(x):
    whole = x.as_strided((2,), (1,), 0)
    return torch.cat([whole, torch.tensor([float(x.storage_offset()), float(x.untyped_storage().nbytes()), *map(float, x.stride())])])


def together(x, y):
    same = x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    return torch.tensor([float(same), float((x.data_ptr() - y.data_ptr()) * same)])


def keep(x):
    KEPT.append(x)
    return x + 1


for name, schema, kernel, description in [
    ("look", "look(Tensor x) -> Tensor", look, lambda x: x.new_empty(4 + x.dim())),
    ("together", "together(Tensor x, Tensor y) -> Tensor", together, lambda x, y: x.new_empty(2)),
    ("keep", "keep(Tensor x) -> Tensor", keep, lambda x: x.new_empty(x.shape)),
]:
    lib.define(schema)
    lib.impl(name, kernel, "CPU")
    lib.impl(name, description, "Meta")
ops = torch.ops.views_for_custom_ops

VIEWS = {
    "rows": lambda y: y[1:],
    "columns": lambda y: y[:, 2:],
    "every other": lambda y: y[1::2, ::3],
    "one row": lambda y: y[2],
    "last part": lambda y: y.split(2)[1],
    "unbound": lambda y: y.unbind(1)[2],
    "transposed": lambda y: y.t()[1:],
    "flat": lambda y: y.view(-1)[5:],
    "rows, flat": lambda y: y[1:].reshape(-1),
    "diagonal": lambda y: y.diagonal(1),
    "windows": lambda y: y[1:].unfold(1, 3, 2),
    "strided": lambda y: y.as_strided((3, 2), (2, 1), 3),
    "expanded": lambda y: y[2:3, 1:2].expand(4, 3),
    "whole": lambda y: y,
    "a copy": lambda y: y[1:].clone(),
    "of a copy": lambda y: y[1:].clone()[1:],
}
BASES = {
    "argument": lambda x: x,
    "own": lambda x: x * 2,
    "written": lambda x: (x * 2).add_(1),
    "product": lambda x: x @ x.t() @ x,
    "sorted": lambda x: x.sort(1)[0],
    "joined": lambda x: torch.cat([x, x * 2]),
    "transposed": lambda x: (x * 2).t().relu().t(),
}


def same(program, make, dynamic=None, grad=False):
    compiled, before = vitrify.compile(program, dynamic=dynamic, fullgraph=True), vitrify.counters["externs_called"]
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            ours, eager = compiled(make()), program(make())
        assert torch.equal(ours, eager), (ours, eager)
    assert vitrify.counters["externs_called"] > before and not vitrify.counters["eager_calls"]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_it_sees_the_whole(base, view, dynamic):
    same(lambda x: ops.look(view(base(x))) * 2, lambda: torch.arange(24.0).view(4, 6), dynamic)


def test_an_argument_that_is_a_part():
    same(lambda x: ops.look(x[1:]) * 2, lambda: torch.arange(30.0)[3:27].view(4, 6))


def test_with_gradients_on():
    same(lambda x: ops.look((x * 2)[1:].detach()) * 2, lambda: torch.arange(24.0).view(4, 6).requires_grad_(), grad=True)


@pytest.mark.parametrize("program", [
    lambda x: ops.together(x[1:], x[:, 2:]),
    lambda x: (lambda y: ops.together(y[1:], y[:, 2:]))(x * 2),
    lambda x: ops.together(x, x.clone()),
    lambda x: ops.together(x[1:], x[1:].clone()),
    lambda x: (lambda y: ops.together(y, y.clone()[1:]))(x * 2),
    lambda x: ops.together((x * 2)[1:], (x * 3)[1:]),
], ids=["of an argument", "of an own value", "a copy of an argument", "a copy of its part", "a copy of an own value", "of two"])
def test_what_shares_memory(program):
    same(lambda x: program(x) + 1, lambda: torch.arange(24.0).view(4, 6))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3)

    def forward(self, x):
        y = self.b(self.a(x).relu())
        return ops.look(y[:, 1:].detach())[2:] + ops.look(y.relu()[:, :, 1:].detach())[2:]


def test_behind_convolutions_in_another_layout():
    net = Net()
    same(net, lambda: torch.ones(2, 3, 16, 16))


@pytest.mark.parametrize("program", [
    lambda x: ops.keep(x[1:]),
    lambda x: ops.keep(x[1:].clone()),
    lambda x: ops.keep(x.clone()),
    lambda x: (ops.keep(x[1:]), x.add_(1))[0],
    lambda x: ops.keep((x * 2)[1:]),
], ids=["a view", "a copy of a view", "a copy", "a view, written later", "an own value"])
def test_what_it_keeps(program):
    def kept(f):
        KEPT.clear()
        x = torch.arange(24.0).view(4, 6)
        f(x), f(x)
        x.mul_(10)
        return [t.clone() for t in KEPT]

    compiled = vitrify.compile(lambda x: program(x) * 2)
    ours, eager = kept(compiled), kept(program)
    assert len(ours) == len(eager) == 2 and all(torch.equal(a, b) for a, b in zip(ours, eager)), (ours, eager)
