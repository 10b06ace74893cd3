"""as_strided of an argument with gaps counts in its memory, not in its elements; and what lies between those may be another argument, which the program writes."""
import pytest
import torch
import vitrify
from beside import check, run, same_call, same_outcome
from torch.utils.checkpoint import checkpoint

MADE = {
    "every second": lambda: torch.arange(16.0)[::2], "every third": lambda: torch.arange(24)[::3], "a column": lambda: torch.arange(64.0).view(8, 8)[:, 0],
    "columns": lambda: torch.arange(16.0).view(4, 4)[:, :2], "rows": lambda: torch.arange(24.0).view(6, 4)[::2], "every second row of columns": lambda: torch.arange(64).view(8, 8)[::2, :3],
    "columns from the middle": lambda: torch.arange(36.0).view(6, 6)[2:, 3:5],
}
READ = {
    "row": lambda x: x.as_strided((4,), (1,)), "table": lambda x: torch.as_strided(x, (2, 3), (3, 1)), "overlapping": lambda x: x.as_strided((3, 3), (1, 1)),
    "copy": lambda x: torch.as_strided_copy(x, (2, 2), (2, 1)), "from the beginning": lambda x: x.as_strided((3,), (2,), 0), "of a row more": lambda x: x.as_strided((1, 4), (4, 1)),
}

OUTSIDE = "columns from the middle", "from the beginning"


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("read", READ)
def test_memory_is_read(read, made):
    check(lambda x: READ[read](x) + 1, lambda: [MADE[made]()], "aten::as_strided reaches outside its tensor" if (made, read) == OUTSIDE else None)


def test_other_places():
    """Of one program: arguments that begin elsewhere, or have other gaps."""
    f = lambda x: x.as_strided((3, 2), (2, 1)) * 2  # noqa: E731
    compiled, base = vitrify.compile(f), torch.arange(40.0)
    for given in (base[1:20:3], base[7:30:4], base[2:9:3], torch.arange(8.0)[::3], base[1:20:3], torch.arange(9.0)[1::3]):
        same_call(run(compiled, [given]), run(f, [given]), [given], [given])


BESIDE = {
    "behind": (lambda b: b.data[:4], lambda w: w.as_strided((8,), (1,))), "before": (lambda b: b.data[4:], lambda w: w.as_strided((8,), (1,), 0)),
    "of nothing": (lambda b: b.data[:0], lambda w: w.as_strided((8,), (1,))),
}
USED = {"branch": lambda v, x: x * 2 if v.sum() > 1 else x * 3, "mask": lambda v, x: x[v > 0], "weight": lambda v, x: v.exp() + x}


@pytest.mark.eager("aten::as_strided reaches outside its tensor", some=True)
@pytest.mark.filterwarnings("ignore:.*reaches outside its tensor")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("where", [*BESIDE, "between"])
def test_what_lies_there_is_written_between_calls(where, used, captured):
    """What is remembered of a tensor's content was remembered of its elements' memory only."""
    pick, read = BESIDE.get(where, (lambda b: b.data[::2][:4], lambda w: w.as_strided((6,), (1,))))
    seen = []
    for compiles in (False, True):
        b = torch.zeros(8)
        w, x = pick(b), torch.ones(8 if where != "between" else 6)
        f = (lambda x: USED[used](read(w), x)) if captured else (lambda x, w: USED[used](read(w), x))  # noqa: B023
        f = vitrify.compile(f) if compiles else f
        told = []
        with torch.no_grad():
            for value in (0, 0, 5, 5, 0):
                b[1::2] = value
                told.append(f(x) if captured else f(x, w))
        seen.append(told)
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("read, made", [(r, m) for r in READ for m in MADE if MADE[m]().is_floating_point() and (m, r) != OUTSIDE])
def test_gradients(read, made):
    def gradients(f):
        x = MADE[made]().requires_grad_()
        first, = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.sum(), x)]
    same_outcome(gradients, lambda x: READ[read](x).sin())


def halves():
    b = torch.arange(16.0).view(4, 4)
    return [b[:, :2], b[:, 2:]]


REASON = "aten::as_strided of an argument's memory with gaps, in a program that writes to arguments"


def turns():
    b = torch.arange(24.0)
    return [b[::2], b[1::2]]


WRITE = {"add_": lambda y: y.add_(100), "out=": lambda y: torch.add(y, 1, out=y), "a part": lambda y: y[0].mul_(3), "copy_": lambda y: y.copy_(y * 2), "normal_": lambda y: y.normal_()}


@pytest.mark.parametrize("given", [halves, turns])
@pytest.mark.parametrize("write", WRITE)
@pytest.mark.parametrize("first", ["read", "write"])
def test_another_argument_lies_between(first, write, given):
    def f(x, y):
        if first == "read":
            v = x.as_strided((4,), (1,))
        WRITE[write](y)
        if first == "write":
            v = x.as_strided((4,), (1,))
        return v + 0
    check(f, given, REASON)


@pytest.mark.parametrize("given", [halves, turns])
def test_what_is_captured_lies_between(given):
    w, o = given()

    def f(x):
        o.fill_(7)
        return w.as_strided((4,), (1,)) + x
    check(f, lambda: [torch.zeros(4)], REASON)


@pytest.mark.eager("beside a checkpoint")
def test_a_checkpoint_looks_again():
    """What it reads is where the argument lies by then, with what is between its elements there."""
    f = lambda x: checkpoint(lambda a: a.as_strided((6,), (1,)).softmax(0), x, use_reentrant=False) * torch.arange(6.0)  # noqa: E731
    seen = []
    for g in (f, vitrify.compile(f)):
        x = torch.linspace(-1, 1, 12)[::2].detach().requires_grad_()
        out = g(x)
        x.data = torch.linspace(-1, 1, 12)[::2].contiguous()
        seen.append(torch.autograd.grad(out.sum(), x)[0])
    torch.testing.assert_close(*seen)
