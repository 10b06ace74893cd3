"""What the *_scatter ops copy is all the memory behind their operand; and who looks at elements made of several asks where memory begins."""
import pytest
import torch
import vitrify

SCATTERS = {
    "slice": lambda x: x.slice_scatter(x[1:] + 1, 0, 1),
    "select": lambda x: x.select_scatter(x[0] + 1, 0, 1),
    "diagonal": lambda x: x.view(4, 4).diagonal_scatter(x[:4] + 1).view(-1),
    "strided": lambda x: torch.as_strided_scatter(x, x[:2] + 1, (2,), (3,), x.storage_offset()),
    "of a part made here": lambda x: (x * 2)[3:].slice_scatter(x[4:] + 1, 0, 1),
    "twice": lambda x: x.slice_scatter(x[1:] + 1, 0, 1).select_scatter(x[0], 0, 1),
}


@pytest.mark.parametrize("fn", SCATTERS.values(), ids=list(SCATTERS))
@pytest.mark.parametrize("look", [lambda t: t.as_strided((3,), (1,), 0), lambda t: t * t.storage_offset(), lambda t: t[2:].as_strided((2,), (1,), 1) + 1],
                         ids=["from the beginning", "where it begins", "through a view"])
@pytest.mark.eager("aten::as_strided counts from the beginning of memory that shows in part only",
                   "reads storage_offset of a tensor, which calls may not have in common", some=True)
def test_memory_before_the_operand(fn, look):
    program = lambda x: look(fn(x))
    compiled = vitrify.compile(program)
    for offset in (0, 5, 3):
        x = torch.arange(40.)[offset:offset + 16]
        assert torch.equal(compiled(x), program(x)), offset


@pytest.mark.parametrize("program", [
    lambda x: x.as_strided((8,), (1,), 2).slice_scatter(x[:3] + 1, 0, 1, 4).as_strided((3,), (2,)) * 2,
    lambda x: x.slice_scatter(x[1:] + 1, 0, 1).as_strided((3,), (2,)) * 2,
], ids=["a window", "of its own"])
def test_from_where_it_begins(program):
    """Without an offset the memory before it does not count."""
    compiled, before = vitrify.compile(program, fullgraph=True), vitrify.counters["kernels_launched"]
    for offset in (0, 5):
        x = torch.arange(40.)[offset:offset + 16].clone()
        assert torch.equal(compiled(x), program(x))
    assert vitrify.counters["kernels_launched"] > before


COPIES = {
    "a clone": lambda x: x.clone(),
    "times one": lambda x: x * 1,
    "dropout that drops nothing": lambda x: torch.dropout(x * 1, 0.5, False),
    "copied": lambda x: torch.empty_like(x).copy_(x),
    "a view of a copy": lambda x: x.clone().view(2, 4)[1],
    "a part of a copy": lambda x: x.clone()[2:6],
    "parts of a copy": lambda x: x.clone().split(4)[1],
}
LOOKS = {
    "wider": lambda t: t.view(torch.int64) + 1,
    "wider, copied": lambda t: torch.empty_like(t.view(torch.int64)).copy_(t.view(torch.int64)),
    "complex": lambda t: torch.view_as_complex(t.reshape(-1, 2)).real + 1,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=list(LOOKS))
@pytest.mark.parametrize("copy", COPIES.values(), ids=list(COPIES))
def test_a_copy_begins_at_a_multiple(copy, look):
    """The argument itself begins at an odd element: a copy that does nothing else was left out, and each call raised and ran again."""
    program = lambda x: look(copy(x))
    compiled = vitrify.compile(program, fullgraph=True)
    for offset in (3, 2, 5):
        x = torch.arange(40.)[offset:offset + 8]
        assert torch.equal(compiled(x), program(x))


def test_eager_refuses_what_begins_elsewhere():
    compiled = vitrify.compile(lambda x: x.view(torch.int64) + 1, fullgraph=True)
    assert torch.equal(compiled(torch.arange(40.)[2:10]), torch.arange(40.)[2:10].view(torch.int64) + 1)
    with pytest.raises(RuntimeError, match="storage_offset"):
        compiled(torch.arange(40.)[3:11])


@pytest.mark.parametrize("scatter", [
    lambda x, z: x[1:9].slice_scatter(z, 0, 0, 2), lambda x, z: (x * 2)[1:9].slice_scatter(z, 0, 0, 2), lambda x, z: x[1:9].select_scatter(z[0], 0, 3),
    lambda x, z: torch.as_strided_scatter(x[1:9], z, (2,), (2,), 1),
], ids=["slice", "of a part made here", "select", "strided"])
@pytest.mark.parametrize("look", [lambda t: t.view(torch.float64) * 1, lambda t: torch.view_as_complex(t.view(-1, 2)).real + 1], ids=["wider", "complex"])
@pytest.mark.eager("counts from the beginning of memory that shows in part only")
def test_it_begins_where_no_larger_element_does(scatter, look):
    def program(x, z):
        try:
            return look(scatter(x, z))
        except RuntimeError as error:
            return str(error)
    compiled = vitrify.compile(program)
    for _ in range(2):
        eager = program(torch.arange(16.), torch.zeros(2))
        assert "storage_offset" in eager and compiled(torch.arange(16.), torch.zeros(2)) == eager
