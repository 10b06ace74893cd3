"""Views of inputs whose shape the program changes in place, and views of inputs that it changes so themselves."""
import pytest
import torch
import vitrify
from beside import check

X = lambda: torch.arange(24.0).view(2, 1, 3, 4)  # noqa: E731
CASES = {
    "a view, transposed": lambda x: (x + 1, x[0].transpose_(0, 1)),
    "a view, squeezed": lambda x: (x + 1, x.narrow(2, 1, 1).squeeze_()),
    "a view, swapped with itself": lambda x: (x + 1, x.narrow(2, 1, 1).swapaxes_(-1, -1)),
    "the input, and a view of it": lambda x: (x.squeeze_() + 1, x[0], x),
    "the input, and a view from before": lambda x: (x[0], x.squeeze_() + 1, x),
    "the input twice": lambda x: (x.squeeze_().unsqueeze_(0) + 1, x.mT, x[0, 1]),
    "the input, written through the view": lambda x: (x.squeeze_()[0].mul_(2), x + 1),
    "a view of a view": lambda x: (x[0].unsqueeze_(0)[..., 1:].mul_(3), x + 1),
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", CASES)
def test_views(name, grad):
    check(CASES[name], lambda: [X()], grad=grad)


LIE_OTHERWISE = {
    "read": lambda x: (x.as_strided_((3, 2), (1, 3)) + 1, x),
    "with an offset": lambda x: (x.as_strided_((2,), (1,), 3) + 1, x),
    "where it lies already": lambda x: (x.as_strided_((2, 1, 3, 4), (12, 12, 4, 1), 0) + 1, x),
    "written": lambda x: (x.as_strided_((3, 2), (1, 3)).mul_(2), x + 1),
    "written before": lambda x: x.mul_(2).as_strided_((3, 2), (1, 3)) + 1,
    "a view from before": lambda x: (x[0], x.as_strided_((2,), (1,), 3) + 1, x.mul_(3)),
    "a view of it": lambda x: (x[0].as_strided_((2,), (1,)).add_(1), x * 2),
    "elements twice": lambda x: (x.as_strided_((3, 4), (1, 1)).sum(0), x),
    "a value": lambda x: (x + 1).as_strided_((3, 4), (1, 1)).sum(0),
    "and back": lambda x: (x.as_strided_((2,), (2,)) + 1, x.as_strided_((2, 4), (4, 1)).mul_(2), x),
}


@pytest.mark.parametrize("name", LIE_OTHERWISE)
def test_as_strided_in_place(name):
    """It was refused for all but the marks that pooling leaves."""
    check(LIE_OTHERWISE[name], lambda: [X()])


def test_resize_as_takes_the_size_of_its_template():
    def f(x, like):
        return x.resize_as_(like) * 2
    check(f, lambda: [X(), torch.ones(3, 2)])
    check(f, lambda: [X(), torch.ones(24)])


@pytest.mark.eager("has more memory than elements", some=True)
@pytest.mark.eager("resize_", some=True)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", [0, 1])
def test_what_lies_behind_an_argument_comes_into_view(first):
    """What resize_ shows of an argument's memory beyond its elements no plan knows: which arguments have some differs from call to call."""
    def program(x):
        x.resize_(4)
        return x[:2] + 1 if first == 0 else x + 1

    compiled = vitrify.compile(program)
    made = [lambda: torch.arange(4.0)[:2], lambda: torch.arange(2.0).clone(), lambda: torch.arange(10.0)[:2], lambda: torch.arange(10.0)[4:6]]
    for make in (made[1:] if first == 0 else made[2:]) * 2:
        given, eager_given = make(), make()
        known = given.untyped_storage().nbytes() // 4 - given.storage_offset()  # the rest is whatever was there
        assert torch.equal(compiled(given), program(eager_given))
        assert torch.equal(given[:known], eager_given[:known])


def test_versions_of_an_input_and_of_a_view_of_it():
    """A view of an input was changed in place beside the input itself: only the latter counted."""
    def f(x):
        v = x.view(-1)
        x.swapaxes_(0, -1)
        v.t_()
        return x + 1
    moved = []
    for g in (f, vitrify.compile(f)):
        x = torch.ones(())
        with torch.no_grad():
            g(x)
        moved.append(x._version)
    assert moved == [2, 2]
