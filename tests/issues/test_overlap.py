"""Writes to memory that is read as well, or written twice: eager's outcome, or eager's error; within a program, and between arguments of any call."""
import sys
import warnings
from pathlib import Path

import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import compare  # noqa: E402


def run(f, args):
    memory = [torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),), (1,), 0) if t.numel() else t for t in args]
    error, out, before = None, None, [t._version for t in args]
    try:
        out = f(*args)
    except Exception as e:
        error = type(e), str(e).partition("\n")[0]
    return out, error, [m.clone() for m in memory], [t._version - b for t, b in zip(args, before)]


def same(f, make, compiled=None):
    """Returns how many plans ran."""
    compiled, before = compiled or vitrify.compile(f), dict(vitrify.counters)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for _ in range(2):
            a, b = make(), make()
            ours, eager = run(compiled, a), run(f, b)
            assert ours[1] == eager[1]
            for (where, p), (_, q) in zip(compare.flat((ours[0], ours[2])), compare.flat((eager[0], eager[2]))):
                if isinstance(q, torch.Tensor):
                    compare.check_meta(where, p, q)
                    torch.testing.assert_close(p, q, equal_nan=True, msg=where)
            assert ours[3] == eager[3]
            assert compare.alias_pattern(ours[0], a) == compare.alias_pattern(eager[0], b)
    return vitrify.counters["compiled_calls"] - before["compiled_calls"]


def numbers(*sizes):
    return torch.arange(1.0, 1 + torch.Size(sizes).numel()).reshape(sizes)


# (written, read) of one matrix.
VIEWS = {
    "shifted columns": lambda x: (x[:, 1:], x[:, :-1]), "shifted rows": lambda x: (x[1:], x[:-1]), "shifted back": lambda x: (x[:-1], x[1:]), "flat": lambda x: (x.view(-1)[1:], x.view(-1)[:-1]),
    "transposed": lambda x: (x, x.t()), "a row": lambda x: (x, x[0]), "a column": lambda x: (x, x[:, :1]), "every second": lambda x: (x.view(-1)[::2], x.view(-1)[:18]),
    "strided": lambda x: (x.view(-1)[1:31:3], x.view(-1)[:20:2]), "diagonal": lambda x: (x.diagonal(), x[0]), "expanded": lambda x: (x, x[0].expand(6, 6)), "unfolded": lambda x: (x[:, 3:], x.view(-1)[:8].unfold(0, 3, 1)),
    "as_strided": lambda x: (x[:2, :4], x.as_strided((2, 4), (2, 1))), "quarters that meet": lambda x: (x[:4, :4], x[2:, 2:]), "permuted": lambda x: (x.view(2, 3, 6), x.view(2, 3, 6).transpose(0, 1).reshape(2, 3, 6) if False else x.view(3, 2, 6).transpose(0, 1)),
}
APART = {
    "halves": lambda x: (x[:, :3], x[:, 3:]), "rows": lambda x: (x[::2], x[1::2]), "even and odd": lambda x: (x.view(-1)[::2], x.view(-1)[1::2]), "quarters": lambda x: (x[:3, :3], x[3:, 3:]), "itself": lambda x: (x, x),
    "itself again": lambda x: (x[1:, 2:], x[1:, 2:]), "crossed": lambda x: (x[:3, 3:], x[3:, :3]), "threes": lambda x: (x.view(-1)[::3], x.view(-1)[1::3]), "top and bottom": lambda x: (x[:3], x[3:]),
    "transposed halves": lambda x: (x[:, :3].t(), x[:, 3:].t()), "a copy": lambda x: (x[1:], x[:-1].clone()),
}
WRITES = {
    "copy_": lambda w, r: w.copy_(r), "add_": lambda w, r: w.add_(r), "mul_": lambda w, r: w.mul_(r), "sub_": lambda w, r: w.sub_(r, alpha=2), "addcmul_": lambda w, r: w.addcmul_(r, r), "out": lambda w, r: torch.add(r, 1, out=w),
    "lerp_": lambda w, r: w.lerp_(r, 0.5), "maximum": lambda w, r: torch.maximum(w, r, out=w), "masked_fill_": lambda w, r: w.masked_fill_(r > 4, 0), "set": lambda w, r: w.__setitem__(slice(None), r), "div_": lambda w, r: w.div_(r),
    "copysign_": lambda w, r: w.copysign_(r), "where": lambda w, r: torch.where(r > 3, r, w, out=w), "foreach": lambda w, r: torch._foreach_add_([w], [r]),
}


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("eager refuses the write", some=True)
@pytest.mark.eager("reads memory it writes", "writes over an argument", "overlaps itself", "writes through aten::unfold", some=True)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("views", VIEWS | APART)
def test_inside_a_program(views, write):
    of, put = (VIEWS | APART)[views], WRITES[write]

    def given(x):
        w, r = of(x)
        put(w, r)
        return x + 1

    def own(x):
        y = x * 2
        w, r = of(y)
        put(w, r)
        return y, y.sum(0)
    apart = views in APART and write != "foreach" and not (views in ("itself", "itself again") and write == "out")
    for f in (given, own):
        ran = same(f, lambda: (numbers(6, 6),))
        vitrify.reset()
        if apart:
            assert ran == 2


OTHERS = {
    "scatter_ by itself": lambda x: x.scatter_(0, torch.zeros(1, 6, dtype=torch.long), x), "scatter_add_ a part": lambda x: x[1:].scatter_add_(0, torch.zeros(2, 6, dtype=torch.long), x[:2]),
    "index_put_ itself": lambda x: x.index_put_((torch.tensor([1, 2]),), x[:2]), "index_add_": lambda x: x.index_add_(0, torch.tensor([1, 2]), x[:2]), "index_copy_": lambda x: x.index_copy_(0, torch.tensor([1, 2]), x[:2]),
    "cumsum_": lambda x: x.cumsum_(0), "cumsum out": lambda x: torch.cumsum(x, 0, out=x), "matmul out": lambda x: torch.mm(x, x, out=x), "addmm_": lambda x: x.addmm_(x, x), "tril_": lambda x: x.tril_(),
    "copy of an expanded": lambda x: x.copy_(x[:1].expand_as(x)), "write to an expanded": lambda x: x[:1].expand(3, 6).add_(1), "write to expanded elements": lambda x: x.view(-1)[:1].expand(5).copy_(torch.arange(5.0)),
    "write to an unfolded": lambda x: x.view(-1).unfold(0, 4, 2).add_(1), "write to an unfolded apart": lambda x: x.view(-1).unfold(0, 4, 4).add_(1), "write to a window": lambda x: x.as_strided((3, 3), (1, 1)).mul_(2),
    "write to a matrix of windows": lambda x: x.as_strided((3, 3), (3, 1)).mul_(2), "fill a window": lambda x: x.as_strided((4, 4), (2, 1)).fill_(7), "zero expanded": lambda x: x[:, :1].expand(6, 4).zero_(),
    "masked_scatter_": lambda x: x[1:].masked_scatter_(x[:-1] > 3, x[:-1]), "cat out": lambda x: torch.cat([x[:3], x[3:]], out=x), "flip": lambda x: x.copy_(x.flip(0)), "roll": lambda x: x.copy_(x.roll(1)),
    "put_": lambda x: x.put_(torch.tensor([1, 2]), x[0, :2]), "swap": lambda x: (x[0].copy_(x[1]), x[1].copy_(x[0])), "sort out": lambda x: torch.sort(x, out=(x, torch.empty(6, 6, dtype=torch.long))),
    "foreach": lambda x: torch._foreach_add_([x[1:], x[:-1]], [x[:-1], x[1:]]), "two outs": lambda x: torch.aminmax(x, dim=0, out=(x[0], x[0])), "bits": lambda x: x.view(torch.int32).copy_(x[0].view(torch.int32)),
    "half as wide": lambda x: x.view(torch.int16)[:, :6].copy_(x.view(torch.int32)),
}


@pytest.mark.no_kernels("eager refuses the write", some=True)
@pytest.mark.eager("reads memory it writes", "writes over an argument", "overlaps itself", "writes through aten::unfold", some=True)
@pytest.mark.parametrize("name", OTHERS)
def test_other_writes(name):
    write = OTHERS[name]

    def f(x):
        r = write(x)
        return x * 2, r if isinstance(r, torch.Tensor) else None
    same(f, lambda: (numbers(6, 6),))


INPUTS = {
    "expanded": lambda: (torch.ones(1, 4).expand(3, 4),), "expanded number": lambda: (torch.ones(()).expand(5),), "unfolded": lambda: (numbers(12).unfold(0, 4, 2),), "window": lambda: (numbers(12).as_strided((3, 3), (1, 1)),),
    "window apart": lambda: (numbers(12).as_strided((3, 3), (3, 1)),), "with gaps": lambda: (numbers(4, 6)[:, ::2],), "transposed": lambda: (numbers(4, 6).t(),), "crossing": lambda: (numbers(40).as_strided((3, 4), (4, 3)),),
    "not crossing": lambda: (numbers(60).as_strided((3, 4), (4, 13)),),
}


@pytest.mark.no_kernels("eager refuses the write", some=True)
@pytest.mark.eager("writes to a tensor that overlaps itself", some=True)
@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("write", ["add_", "copy_", "fill_", "row", "cumsum_", "index_put_"])
def test_inputs_that_overlap_themselves(name, write):
    put = {"add_": lambda x: x.add_(1), "copy_": lambda x: x.copy_(torch.arange(float(x.numel())).reshape(x.shape)), "fill_": lambda x: x.fill_(3), "row": lambda x: x[0].mul_(2), "cumsum_": lambda x: x.cumsum_(0),
           "index_put_": lambda x: x.index_put_((torch.tensor([1]),), torch.tensor(5.0))}[write]
    ran = same(lambda x: (put(x), x + 1)[1], INPUTS[name])
    assert ran == 2 or name in ("expanded", "expanded number", "unfolded", "window", "crossing")


ARGUMENTS = {
    "apart": lambda: (numbers(4, 4), numbers(4, 4) + 50), "same": lambda: (lambda x: (x, x))(numbers(4, 4)), "same memory": lambda: (lambda x: (x, x.view_as(x)))(numbers(4, 4)),
    "detached": lambda: (lambda x: (x, x.detach()))(numbers(4, 4)), "shifted": lambda: (lambda m: (m[1:], m[:-1]))(numbers(5, 4)), "shifted back": lambda: (lambda m: (m[:-1], m[1:]))(numbers(5, 4)),
    "halves": lambda: (lambda m: (m[:4], m[4:]))(numbers(8, 4)), "of numpy": lambda: (lambda a: (torch.from_numpy(a), torch.from_numpy(a)))(numbers(4, 4).numpy().copy()),
    "of numpy, shifted": lambda: (lambda a: (torch.from_numpy(a[1:]), torch.from_numpy(a[:-1])))(numbers(5, 4).numpy().copy()),
    "of dlpack": lambda: (lambda x: (x, torch.from_dlpack(x)))(numbers(4, 4)), "of a buffer": lambda: (lambda b: (torch.frombuffer(b, dtype=torch.float32, count=16, offset=16).view(4, 4), torch.frombuffer(b, dtype=torch.float32, count=16).view(4, 4)))(bytearray(80)),
}
PROGRAMS = {
    "write and read": lambda x, y: (x.add_(1), y * 2)[1], "read and write": lambda x, y: ((y * 2), x.add_(1))[0], "both": lambda x, y: (x.add_(1), y.mul_(3), x + y)[2], "from the other": lambda x, y: (x.copy_(y), x + y)[1],
    "twice": lambda x, y: (x.add_(y), x.add_(y))[1], "rows": lambda x, y: (x[0].copy_(y[1]), y[2].copy_(x[0]))[1], "read only": lambda x, y: x + y,
}


@pytest.mark.sweep(3)
@pytest.mark.eager("which shares memory with", "an argument shares memory with one that is written", some=True)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("first", ARGUMENTS)
def test_arguments(first, program):
    """Every other relation after `first`, with the same sizes, and `first` again."""
    f = PROGRAMS[program]
    compiled = vitrify.compile(f)
    for name in (first, *ARGUMENTS, first):
        ran = same(f, ARGUMENTS[name], compiled)
        if name in ("apart", "same", "halves") and program != "rows" or program == "read only":
            assert ran == 2 or first not in ("apart",), name


@pytest.mark.parametrize("of", [lambda m: numbers(4, 4), pytest.param(lambda m: m[1:], marks=pytest.mark.eager("an argument shares memory with one that is written", "which is of the same memory", some=True)), pytest.param(lambda m: torch.from_numpy(m.numpy()[1:]), marks=pytest.mark.eager("an argument shares memory with one that is written"))], ids=["apart", "a view", "of numpy"])
def test_captured_tensors(of):
    def made():
        memory = numbers(5, 4)
        held = memory[:-1]
        return (lambda x: (x.add_(1), held * 2)[1]), memory
    (f, a), (g, b) = made(), made()
    compiled = vitrify.compile(f)
    for other in (lambda m: numbers(4, 4), of, of, lambda m: numbers(4, 4)):
        assert torch.equal(compiled(other(a)), g(other(b))) and torch.equal(a, b)


@pytest.mark.eager("which shares memory with")
def test_sizes_that_change():
    def f(x, y):
        x[:, 1:].add_(y[:, 1:])
        return x * 2
    compiled = vitrify.compile(f, dynamic=True)
    for n in (3, 5, 8):
        for make in (lambda: (numbers(n, 4), numbers(n, 4)), lambda: (lambda m: (m[1:], m[:-1]))(numbers(n + 1, 4)), lambda: (numbers(n, 8)[:, ::2], numbers(n, 4))):
            same(f, make, compiled)


TENTHS = numbers(24).double() / 10
OVERLAPPING = {
    "expanded columns": lambda t: t[:7, None].expand(7, 2), "expanded rows": lambda t: t[None, :5].expand(4, 5), "all of one": lambda t: t[0].expand(3, 4), "windows": lambda t: t[:10].unfold(0, 4, 2),
    "windows of rows": lambda t: t.view(3, 8).unfold(1, 3, 1), "further in": lambda t: t.as_strided((3, 3), (2, 1), 4), "both": lambda t: t.as_strided((2, 3, 3), (0, 2, 1), 1), "neither": lambda t: t.view(4, 6),
}
STRIDED = {
    "as it lies": lambda x: x.as_strided(x.shape, x.stride()), "and read": lambda x: x.as_strided(x.shape, x.stride()).sin() * x, "twice": lambda x: x.as_strided(x.shape, x.stride()).as_strided(x.shape, x.stride()).sin(),
    "of a result": lambda x: x.sin().expand(3, *x.shape).as_strided((3, *x.shape), (0, *x.sin().stride())).cos(), "to what overlaps": lambda x: x.clone().as_strided((2, 2), (1, 1)).exp(),
    "to one element": lambda x: x.as_strided((2, 3), (1, 0)).sin(), "copied": lambda x: torch.as_strided_copy(x, x.shape, x.stride()) * 2,
}


@pytest.mark.sweep(3)
@pytest.mark.compiled("views of arguments are as eager makes them")
@pytest.mark.no_kernels("looks outside of what was given", some=True)
@pytest.mark.eager("reaches outside its tensor", some=True)
@pytest.mark.filterwarnings("ignore:.*reaches outside its tensor")
@pytest.mark.parametrize("again", (False, True))
@pytest.mark.parametrize("view", STRIDED)
@pytest.mark.parametrize("given", OVERLAPPING)
def test_gradients_of_what_overlaps_itself(given, view, again):
    """Eager's gradient of an element is shared among all the places that look at it: as_strided() of a tensor as it lies is no alias to it."""
    f, told = STRIDED[view], []
    for g in (f, *[vitrify.compile(f)] * 2):
        x = OVERLAPPING[given](TENTHS.clone()).detach().requires_grad_()
        out = g(x)
        loss = (out * numbers(*out.shape) / 50).sin().sum()
        if again:
            made, = torch.autograd.grad(loss, x, create_graph=True)
            told.append((made, *torch.autograd.grad(made.sin().sum(), x)))
        else:
            told.append((out, *torch.autograd.grad(loss, x)))
    for ours in told[1:]:
        for p, q in zip(ours, told[0]):
            assert again or p.stride() == q.stride()
            torch.testing.assert_close(p, q)


@pytest.mark.no_kernels("eager refuses it")
def test_no_gradient_of_a_scatter_into_what_has_another_order():
    def f(x):
        return torch.as_strided_scatter(x.t(), torch.ones(2, 1), (2, 1), (1, 1))
    for g in (f, vitrify.compile(f)):
        with pytest.raises(RuntimeError, match="requires_grad"):
            g(numbers(4, 6).requires_grad_())


SEVERAL = {
    "statistics": (lambda x, m, g: F.batch_norm(x, m, m, training=True), "native_batch_norm"),
    "statistics that meet": (lambda x, m, g: F.batch_norm(x[:, :2], m[:2], m[1:], training=True), "native_batch_norm"),
    "statistics of the input": (lambda x, m, g: F.batch_norm(x, x[0], x[1], training=True), "native_batch_norm"),
    "the weight": (lambda x, m, g: F.batch_norm(x, m, g, weight=m, training=True), "native_batch_norm"),
    "gradients": (lambda x, m, g: torch._amp_foreach_non_finite_check_and_unscale_([g, g], m[:1], torch.tensor(0.5)), "writes one memory twice"),
    "parameters": (lambda x, m, g: torch._fused_sgd_([m, m], [g, g], [x[0], x[0]], weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False, maximize=False, is_first_step=False), "writes one memory twice"),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_what_one_op_writes_meets_itself(name):
    """Each of several written arguments was computed of what had been there before, and the last won."""
    f, why = SEVERAL[name]
    expects.eager(why)
    torch.set_num_threads(1)  # of several, eager's write statistics that meet in any order
    made = [torch.linspace(-1, 2, 12).view(4, 3).clone(), torch.linspace(0.5, 1, 3), torch.linspace(2, 4, 3)]
    ours, eager = ([t.clone() for t in made] for _ in range(2))
    compiled = vitrify.compile(f)
    with torch.no_grad():
        for _ in range(2):
            a, b = compiled(*ours), f(*eager)
            torch.testing.assert_close(ours, eager)
            if isinstance(b, torch.Tensor):
                torch.testing.assert_close(a, b)
