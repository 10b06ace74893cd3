"""Dims that a tensor does not have, and parts of another size than their place: Meta kernels let some of them pass, and the rules went on with them: the process died, or foreign memory was read."""
import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify

X, I = torch.arange(24.0).view(4, 6), torch.tensor([0])
REFUSED = {
    **{f"softmax({d})": lambda x, d=d: x.softmax(d) * 2 for d in (2, 3, -3, 5, 100, -100)}, "softmin": lambda x: F.softmin(x, 2), "of a vector": lambda x: x[0].softmax(1), "of halves": lambda x: x.half().softmax(2), "gumbel": lambda x: F.gumbel_softmax(x, dim=3),
    "log_softmax": lambda x: x.log_softmax(3), "select_scatter's dim": lambda x: x.select_scatter(x[0], 2, 0), "slice_scatter's dim": lambda x: x.slice_scatter(x, 2), "diagonal_scatter's dims": lambda x: x.diagonal_scatter(x[0, :4], 0, 0, 0), "a dim of a diagonal": lambda x: x.diagonal_scatter(x[0], 0, 7, 1),
    "index_add's dim": lambda x: x.index_add(6, I, x[:1]), "index_add": lambda x: x.index_add(0, I, x[:1, :3]), "index_add, unused": lambda x: (x.index_add(0, I, x[:1, :3]), x + 1)[1],
    "a part": lambda x: x.select_scatter(x[:1], 0, 0), "a scalar": lambda x: x.select_scatter(x[0, 0], 0, 0), "a place": lambda x: x.select_scatter(x[0], 0, 9), "a place before": lambda x: x.select_scatter(x[0], 0, -5), "rows": lambda x: x.slice_scatter(x[:1], 0, 0, 4),
    "columns": lambda x: x.slice_scatter(x[:, :3], 0), "backwards": lambda x: x.slice_scatter(x, 0, 0, 4, -1), "a diagonal": lambda x: x.diagonal_scatter(x[0]), "of one": lambda x: x.diagonal_scatter(x[0, :1]), "roll": lambda x: x.roll(1, 3), "cumsum": lambda x: x.cumsum(3), "argmax": lambda x: x.argmax(2),
}


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_eager_refuses(name, dynamic, grad):
    expects.no_kernels("the program raises")
    x, compiled = X.clone().requires_grad_(grad), vitrify.compile(REFUSED[name], dynamic=dynamic)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            with pytest.raises(Exception) as eager:
                REFUSED[name](x)
            with pytest.raises(Exception) as ours:
                compiled(x)
            assert type(ours.value) is type(eager.value) and str(ours.value) == str(eager.value)


def test_a_program_that_catches_it():
    def f(x):
        try:
            y = x.softmax(3)
        except IndexError:
            y = x * 2
        return y + 1
    compiled = vitrify.compile(f)
    for _ in range(2):
        assert torch.equal(compiled(X), f(X))


def test_parts_of_changing_sizes():
    def f(x, y, n):
        return x.slice_scatter(y, 0, 0, n) * 2, x.select_scatter(y[0], 0, 1) + 1, x.diagonal_scatter(x.diagonal() * 3) - 1, x.index_add(0, torch.arange(y.shape[0]), y)
    compiled = vitrify.compile(f, dynamic=True)
    for rows, columns, n in ((4, 6, 2), (5, 7, 3), (9, 3, 1)):
        x = torch.arange(float(rows * columns)).view(rows, columns)
        for ours, eager in zip(compiled(x, -x[:n], n), f(x, -x[:n], n)):
            assert torch.equal(ours, eager) and ours.stride() == eager.stride()


@pytest.mark.parametrize("caught", [False, True])
def test_a_library_call_that_fails_with_what_it_stands_for(caught):
    """There was no error any more by the time it was to be raised again."""
    def f(x):
        try:
            return F.conv2d(x, torch.arange(4.0).view(1, 1, 2, 2), padding=-1) + 1
        except RuntimeError:
            if not caught:
                raise
            return x * 2
    expects.eager("raised what eager does not, or what the program catches", some=True)
    expects.no_kernels("a library call is refused", some=True)
    compiled, x = vitrify.compile(f), torch.ones(1, 1, 4, 6)
    for _ in range(3):
        if caught:
            assert torch.equal(compiled(x), f(x))
            continue
        with pytest.raises(RuntimeError) as eager:
            f(x)
        with pytest.raises(RuntimeError) as ours:
            compiled(x)
        assert str(ours.value) == str(eager.value)


@pytest.mark.parametrize("made", [False, True], ids=["held", "made"])
def test_weights_of_convolutions_that_are_expanded(made):
    w = torch.rand(5, 5)
    def f(x):
        kernel = (w * 2 if made else w).expand(3, 1, 5, 5)
        return F.conv2d(F.conv2d(x, kernel, groups=3), kernel, groups=3)
    x, compiled = torch.rand(2, 3, 13, 13), vitrify.compile(f)
    expects.no_kernels("calls of the library", some=True)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), f(x))


@pytest.mark.parametrize("size", [(-1, 0), (-1, 2), (2, -3)], ids=str)
@pytest.mark.parametrize("pool", [F.adaptive_max_pool2d, F.adaptive_avg_pool2d])
def test_negative_sizes_of_results(pool, size):
    expects.no_kernels("the program raises")
    x = torch.ones(1, 1, 4, 4)
    with pytest.raises(RuntimeError) as eager:
        pool(x, size)
    with pytest.raises(RuntimeError) as ours:
        vitrify.compile(lambda x: pool(x, size))(x)
    assert str(ours.value) == str(eager.value)
