"""What a program reads of a tensor without an op: compared in every call where it can be, else the program runs eagerly. Each has a later call in which it differs."""
import copy
import io

import numpy as np
import pytest
import torch
import vitrify
from torch import nn

A = torch.arange


def plain():
    return A(8.0)


def view():
    return A(40.0)[:8]


def later():
    return A(40.0)[1:9]


def written():
    return A(8.0).add_(1)


@torch.enable_grad()
def leaf():
    return A(8.0, requires_grad=True)


@torch.enable_grad()
def product():
    return A(8.0, requires_grad=True) * 2


@torch.enable_grad()
def part():
    return A(16.0, requires_grad=True).split(8)[1]


def retains():
    t = product()
    t.retain_grad()
    return t


def hooked():
    t = leaf()
    t.register_hook(lambda g: g)
    return t


def larger():
    t = plain()
    t.untyped_storage().resize_(400)
    return t


MAKES = (plain, view, later, written, larger, leaf, product, part, retains, hooked)
COMPARED = {
    "untyped_storage().nbytes()": lambda x: x.untyped_storage().nbytes(),
    "storage().size()": lambda x: x.storage().size(),
    "memory of a view": lambda x: x[2:].untyped_storage().nbytes(),
    "storage_offset()": lambda x: x.storage_offset(),
    "storage_offset() of a view": lambda x: x[2:].storage_offset(),
    "is_inference()": lambda x: x.is_inference(),
    "is_leaf": lambda x: x.is_leaf,
    "grad": lambda x: x.grad is None,
    "of what the program made": lambda x: ((x + 1).add_(1)._version, (x + 1)[2:]._base is None, (x + 1)[2:].storage_offset(), (x + 1).untyped_storage().nbytes()),
}
REFUSED = {
    "_version": (lambda x: x._version, "reads _version of a tensor"),
    "_version of a view": (lambda x: x[1:]._version, "reads _version of a tensor"),
    "_base": (lambda x: x._base is None, "reads _base of a tensor"),
    "_base of a view": (lambda x: x[2:]._base is x, "reads _base of a tensor"),
    "_is_view()": (lambda x: x._is_view(), "reads _is_view of a tensor"),
    "is_set_to": (lambda x: x.is_set_to(x[:]), "aten::is_set_to"),
    "data_ptr()": (lambda x: x.data_ptr() % 64, "its data cannot be read"),
    "is_shared()": (lambda x: x.is_shared(), "shared between processes"),
}
REFUSED_WITH_GRADIENTS = {
    "grad_fn": (lambda x: x.grad_fn.name() if x.grad_fn else "", "reads grad_fn of a tensor"),
    "output_nr": (lambda x: x.output_nr, "reads output_nr of a tensor"),
    "retains_grad": (lambda x: x.retains_grad, "reads retains_grad of a tensor"),
    "_backward_hooks": (lambda x: bool(x._backward_hooks), "registers a hook on a tensor, or looks at those it has"),
}


def check(fact, makes, grad=False):
    def program(x):
        return x.detach() + 1, str(fact(x))
    compiled = vitrify.compile(program, options={"recompile_limit": 100})
    with torch.set_grad_enabled(grad):
        for make in makes:
            ours, eager = compiled(make()), program(make())
            assert ours[1] == eager[1] and torch.equal(ours[0], eager[0]), make.__name__


@pytest.mark.parametrize("first", [plain, view, leaf, written])
@pytest.mark.parametrize("fact", COMPARED.values(), ids=COMPARED)
def test_a_fact_that_calls_compare(fact, first):
    check(fact, (first, *MAKES, first))


@pytest.mark.parametrize("first", [plain, view, leaf, written])
@pytest.mark.parametrize("fact, why", REFUSED.values(), ids=REFUSED)
@pytest.mark.no_kernels("where it is refused for all of them", some=True)
def test_a_fact_that_nobody_can_compare(fact, why, first):
    import expects
    expects.eager(why)
    check(fact, (first, *MAKES, first))


@pytest.mark.parametrize("fact, why", REFUSED_WITH_GRADIENTS.values(), ids=REFUSED_WITH_GRADIENTS)
@pytest.mark.no_kernels("where it is refused for all of them", some=True)
def test_the_history_of_an_argument(fact, why):
    import expects
    expects.eager(why)
    check(fact, (plain, leaf, product, part, retains, hooked, leaf), grad=True)


def test_memory_that_two_arguments_share():
    def program(x, y):
        return x + y, x.untyped_storage()._cdata == y.untyped_storage()._cdata
    compiled, base = vitrify.compile(program), A(8.0)
    for x, y in ((A(4.0), A(4.0)), (A(4.0), A(4.0))):
        assert compiled(x, y)[1] is program(x, y)[1] is False
    import expects
    expects.eager("reads untyped_storage of a tensor")
    both = base[:4], base[4:]
    assert compiled(*both)[1] is program(*both)[1] is True


class Looks(nn.Module):
    def __init__(self, fact):
        super().__init__()
        self.fact, self.b = fact, nn.Buffer(A(4.0))

    def forward(self, x):
        return x + self.b, self.fact(self.b)


@pytest.mark.parametrize("fact", [lambda b: b._version, lambda b: b.data_ptr(), lambda b: b.tolist(), lambda b: b.numpy().sum(), lambda b: b.untyped_storage()[0]],
                         ids=["_version", "data_ptr", "tolist", "numpy", "untyped_storage"])
@pytest.mark.eager("of a tensor, which calls may not have in common")
def test_a_buffer_that_is_read_without_an_op(fact):
    m = Looks(fact)
    compiled = vitrify.compile(m)
    for _ in range(3):
        assert compiled(A(4.0))[1] == m(A(4.0))[1]
        m.b.add_(1)


def test_where_a_buffer_begins():
    m = Looks(lambda b: (b.storage_offset(), b._is_view()))
    compiled, x = vitrify.compile(m), A(4.0)
    for b in (A(4.0), A(8.0)[4:], A(8.0)[:4]):
        m.b = b
        assert compiled(x)[1] == m(x)[1]


def test_memory_keeps_its_size_when_a_tensor_shrinks():
    def program(x):
        return x * 2, (x + 1).resize_(2).untyped_storage().nbytes()
    compiled, x = vitrify.compile(program), A(4.0)
    with torch.no_grad():
        assert compiled(x)[1] == program(x)[1] == 16


CAUGHT = {
    "tolist()": lambda x: x.tolist(), "of what is computed": lambda x: (x + 1).tolist(), "numpy()": lambda x: x.numpy(), "asarray": lambda x: np.asarray(x), "data_ptr()": lambda x: x.data_ptr(),
    "of the memory": lambda x: x.untyped_storage().data_ptr(), "bytes of the memory": lambda x: x.untyped_storage()[0], "str()": lambda x: str(x), "deepcopy()": lambda x: copy.deepcopy(x),
    "to_dlpack": lambda x: torch.utils.dlpack.to_dlpack(x), "bool()": lambda x: bool(x.exp().sum() > 1), "int()": lambda x: int(x.exp()[0]), "save": lambda x: torch.save(x, io.BytesIO()),
    "map_": lambda x: x.clone().map_(x, lambda a, b: a), "frombuffer": lambda x: memoryview(x.numpy()), "share_memory_()": lambda x: x.share_memory_(),
}


@pytest.mark.parametrize("caught", [Exception, (RuntimeError, TypeError, NotImplementedError, ValueError)], ids=["Exception", "RuntimeError"])
@pytest.mark.parametrize("look", CAUGHT.values(), ids=CAUGHT)
def test_a_program_catches_what_placeholders_raise(look, caught):
    """It went the way of its handler, in all calls."""
    import expects
    expects.eager("its data cannot be read", "shared between processes", "reads a tensor's value", "aten::", "untyped_storage", "looks at those it has", some=True)

    def program(x):
        try:
            look(x)
            n = 1
        except caught:
            n = 2
        return x * n + 1
    compiled = vitrify.compile(program)
    for _ in range(3):
        assert torch.equal(compiled(A(4.0)), program(A(4.0)))
