"""Negative and conjugate bits: of views that a program makes, of its inputs and of its results, in its writes and in its guards."""
import sys
from pathlib import Path

import pytest
import torch
import vitrify

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import beside  # noqa: E402
import compare  # noqa: E402

COMPLEX = [torch.complex64, torch.complex128]


def number(dtype, *sizes):
    n = torch.Size(sizes).numel()
    t = torch.arange(1, n + 1, dtype=torch.float64).reshape(sizes)
    return torch.complex(t, t.flip(0) - 7).to(dtype)


# What carries a bit, of a complex tensor.
VIEWS = {
    "imag of conj": lambda z: z.conj().imag,
    "imag of conj of a part": lambda z: z.conj()[1:, ::2].imag,
    "part of imag of conj": lambda z: z.conj().imag[1:, ::2].t(),
    "conj": lambda z: z.conj(),
    "conj of a part": lambda z: z[1:, ::2].conj().t(),
    "real of conj": lambda z: z.conj().real,
    "twice": lambda z: z.conj().conj(),
    "neg view": lambda z: z.real._neg_view(),
    "neg view twice": lambda z: z.real._neg_view()._neg_view(),
    "neg view of a neg view of imag": lambda z: z.conj().imag._neg_view(),
    "neg view of complex": lambda z: z._neg_view(),
    "neg view of conj": lambda z: z.conj()._neg_view(),
    "adjoint": lambda z: z.mH,
    "a row": lambda z: z.conj().imag[0],
    "an element": lambda z: z.conj().imag[0, 1],
    "expanded": lambda z: z.conj().imag[:1].expand(5, 4),
}
# What reads it.
READS = {
    "add": lambda v: v + 1,
    "itself": lambda v: v,
    "detach": lambda v: v.detach(),
    "view of it": lambda v: v.reshape(-1) if v.is_contiguous() else v.unsqueeze(0),
    "sum": lambda v: v.sum(),
    "clone": lambda v: v.clone(),
    "contiguous": lambda v: v.contiguous(),
    "resolve_neg": lambda v: v.resolve_neg(),
    "resolve_conj": lambda v: v.resolve_conj(),
    "resolve both": lambda v: v.resolve_conj().resolve_neg() * 2,
    "matmul": lambda v: v.reshape(1, -1) @ v.reshape(-1, 1),
    "copy_": lambda v: torch.zeros_like(v).copy_(v),
    "copy_ of a part": lambda v: torch.zeros((2, *v.shape), dtype=v.dtype)[1].copy_(v),
    "cat": lambda v: torch.cat([v.reshape(-1), v.reshape(-1)]),
    "stack": lambda v: torch.stack([v, v * 2]),
    "fft": lambda v: torch.fft.fft(v.reshape(-1)),
    "sort": lambda v: v.reshape(-1).abs().sort(),
    "cumsum": lambda v: v.reshape(-1).cumsum(0),
    "where": lambda v: torch.where(v.abs() > 3, v, v * 0),
    "flags": lambda v: (v + 1, v.is_neg(), v.is_conj()),
    "to": lambda v: v.to(torch.complex128),
    "index": lambda v: v.reshape(-1)[torch.tensor([0, 0])],
    "two": lambda v: (v, v + 1, v),
}


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_the_program(view, read):
    of, use = VIEWS[view], READS[read]
    for f in (lambda z: use(of(z * 2)), lambda z: use(of(z))):
        compare_thrice(f, lambda: (number(torch.complex64, 3, 4),))


@pytest.mark.sweep(3)
@pytest.mark.compiled("ATen computes complex numbers, or only views are made")
@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("view", VIEWS)
def test_inputs_that_carry_a_bit(view, read):
    of, use = VIEWS[view], READS[read]
    compare_thrice(use, lambda: (of(number(torch.complex64, 3, 4)),))


def compare_thrice(f, make):
    """Values by their bits, flags, aliasing, versions and errors as eager's, and nothing runs eagerly."""
    compiled, before = vitrify.compile(f), dict(vitrify.counters)
    with torch.no_grad():
        for _ in range(3):
            a, b = make(), make()
            beside.same_call(beside.run(compiled, a), beside.run(f, b), a, b)
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    assert did["compiled_calls"] == 3 and did["eager_calls"] == 0
    vitrify.reset()


WRITES = {
    "add_": lambda v: v.add_(1),
    "mul_": lambda v: v.mul_(2),
    "copy_": lambda v: v.copy_(torch.full_like(v, 3)),
    "copy_ of a negative": lambda v: v.copy_(number(torch.complex64, *v.shape).conj().imag.to(v.dtype)),
    "fill_": lambda v: v.fill_(2),
    "zero_": lambda v: v.zero_(),
    "a row": lambda v: v[0].mul_(3),
    "an index": lambda v: v.index_put_((torch.tensor([0]),), torch.ones(v.shape[1:], dtype=v.dtype)),
    "masked": lambda v: v.masked_fill_(v.abs() > 4, 1),
    "out": lambda v: torch.add(v.clone(), 1, out=v),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", ["imag of conj", "conj", "part of imag of conj", "conj of a part", "neg view", "neg view of a neg view of imag", "adjoint"])
def test_writes_through_views(view, write):
    of, put = VIEWS[view], WRITES[write]

    def own(z):
        z = z * 1
        v = of(z)
        w = put(v)
        return z + 1, v, w

    def given(z):
        v = of(z)
        put(v)
        return v, z * 2
    for f in (own, given):
        compare_thrice(f, lambda: (number(torch.complex64, 3, 4),))


@pytest.mark.parametrize("write", [w for w in WRITES if w != "out"])
@pytest.mark.parametrize("view", ["imag of conj", "conj", "part of imag of conj", "neg view"])
def test_writes_to_inputs_that_carry_a_bit(view, write):
    of, put = VIEWS[view], WRITES[write]
    f = lambda v: (put(v), v + 1)  # noqa: E731
    compiled = vitrify.compile(f)
    with torch.no_grad():
        for _ in range(3):
            a, b = number(torch.complex64, 3, 4), number(torch.complex64, 3, 4)
            ours, eager = compiled(of(a)), f(of(b))
            assert torch.equal(a, b) and compare.bits_equal(ours[1], eager[1]) and compare.bits_equal(ours[0], eager[0])
            assert ours[0].is_neg() == eager[0].is_neg() and ours[0].is_conj() == eager[0].is_conj() and a._version == b._version
    assert vitrify.counters["compiled_calls"] == 3


def test_ihfft():
    compare_thrice(lambda x: torch.fft.ihfft(x).imag + 1, lambda: (torch.arange(10.0),))
    compare_thrice(lambda x: (torch.fft.ihfft(x), torch.fft.ihfft(x).imag), lambda: (torch.arange(10.0),))


@pytest.mark.compiled("ATen computes complex numbers")
@pytest.mark.parametrize("make", [lambda z: z.conj(), lambda z: z.imag, lambda z: z.conj().imag, lambda z: z.resolve_conj()])
def test_captured_tensors(make):
    z = number(torch.complex64, 3, 4)
    captured = make(z)
    f = lambda x: (x + captured, captured.sum())  # noqa: E731
    compare_thrice(f, lambda: (torch.ones(3, 4),))
    compiled = vitrify.compile(f)
    for _ in range(2):
        ours, eager = compiled(torch.ones(3, 4)), f(torch.ones(3, 4))
        assert all(compare.bits_equal(a, b) for a, b in zip(ours, eager))
        z.mul_(2)


def test_a_linear_of_a_negative_weight():
    """What is kept once per weights is no view of them."""
    net = torch.nn.Linear(4, 5)
    net.weight = torch.nn.Parameter(number(torch.complex64, 5, 4).conj().imag, requires_grad=False)
    assert net.weight.is_neg()
    x = torch.arange(8.0).reshape(2, 4)
    with torch.no_grad():
        want = net(x)
        compiled = vitrify.compile(net)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), want)


def test_guards_see_the_bits():
    f = vitrify.compile(lambda x: (x * 2, x))
    z = number(torch.complex64, 3, 4)
    real = z.imag.clone()
    for x in (real, z.conj().imag, real, z.imag, z.conj(), z.resolve_conj(), z.conj().imag):
        got = f(x)
        assert torch.equal(got[0], x * 2) and got[0].is_neg() is False and got[1] is x
    assert vitrify.counters["compiled_calls"] == 7 and vitrify.counters["eager_calls"] == 0


@pytest.mark.parametrize("view", VIEWS)
def test_gradients(view):
    of = VIEWS[view]

    def f(z):
        v = of(z)
        return v * v, (v * 2).abs().sum()

    def gradient(g):
        z = number(torch.complex64, 3, 4).requires_grad_()
        y, s = g(z)
        (y.abs().sum() + s).backward()
        return y.detach(), z.grad
    compiled = vitrify.compile(f)
    for a, b in zip(gradient(compiled), gradient(f)):
        torch.testing.assert_close(a, b)
        assert a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8])
def test_negative_views_of_every_type(dtype):
    compare_thrice(lambda x: (x._neg_view() + 1, x._neg_view(), x._neg_view().sum()), lambda: (torch.arange(-3, 4).to(dtype),))
    compare_thrice(lambda x: (x + 1, x.clone(), x.t().contiguous()), lambda: (torch.arange(-3, 3).to(dtype).reshape(2, 3)._neg_view(),))


@pytest.mark.parametrize("of", [lambda z: z.expand(2, *z.shape).imag, lambda z: z.expand(2, *z.shape).mT.conj().imag, lambda z: z[:1].expand(5, 4).conj().real, lambda z: torch.view_as_real(z.expand(2, *z.shape)).select(-1, 0)],
                         ids=["imag", "imag of an adjoint", "real of conj", "view_as_real"])
@pytest.mark.parametrize("outer", [0, 1], ids=["made", "given"])
def test_parts_of_expanded_complex_numbers(of, outer):
    """What a view hands through is kept in the strides that views of it are recorded with."""
    z = number(torch.complex64, 3, 4)
    compare_thrice(lambda z: of(z if outer else z * 2).neg() + 1, lambda: (z.clone(),))
    compare_thrice(lambda z: of(z) + 1, lambda: (z.clone()[:, :1].expand(3, 4),))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("of", [lambda z: z.conj().clone().imag, lambda z: (z * 2).imag, lambda z: z[1] * z[0], lambda z: torch.view_as_real(z.conj()).clone(), lambda z: z.imag.neg()],
                         ids=["clone", "product", "rows", "view_as_real", "imag"])
def test_conjugate_inputs_under_dynamic_sizes(of, dynamic):
    """Where guards fixed a size, the call was given a window on the input's memory, which has no conjugate bit."""
    z, r, f = number(torch.complex64, 3, 4).conj(), torch.randn(5), lambda z, r: (of(z) + 1, r + 1)
    with torch.no_grad():
        ours, eager = vitrify.compile(f, dynamic=dynamic)(z, r), f(z, r)
    assert torch.equal(ours[0], eager[0]) and torch.equal(ours[1], eager[1])


@pytest.mark.parametrize("of", [lambda z: z, lambda z: z.t(), lambda z: z * 2, lambda z: z.real, lambda z: z.imag], ids=["itself", "transposed", "times", "real", "imag"])
@pytest.mark.parametrize("how", ["backward", "grad", "create_graph"])
def test_gradients_that_are_parts_of_conjugates(of, how):
    """Gradients of complex()'s parts are views of the tangent, which has no parts where it is a lazy conjugate."""
    def program(x, w):
        return of(torch.complex(x, w).conj()), (x * w).exp()  # kernels of ours have no complex numbers

    def run(f):
        x, w = (torch.linspace(-1, 2, 6).view(2, 3).add(i).requires_grad_() for i in (0, 1))
        y, e = f(x, w)
        t = torch.arange(y.numel(), dtype=torch.float32).view(y.shape) * (1 if y.dtype == torch.float32 else 1 + 2j)
        if how == "backward":
            torch.autograd.backward([y, e.sum()], [t, None])
            return x.grad, w.grad
        g = torch.autograd.grad(y, (x, w), t, create_graph=how == "create_graph", allow_unused=True)
        return [torch.zeros(2, 3) if v is None else v.detach().clone() for v in g]
    for a, b in zip(run(vitrify.compile(program, fullgraph=True)), run(program), strict=True):
        torch.testing.assert_close(a, b)


def parts_of_a_copy(z):
    return torch.polar(z.resolve_conj().abs() + 1, z.resolve_conj().real)


def parts_of_a_resolved(z):
    return torch.view_as_real(z.resolve_conj().resolve_neg()) * 2


def parts_of_a_clone(z):
    return torch.view_as_real(z.mT.clone().mT) * 2 if z.dim() > 1 else torch.view_as_real(z.clone()) * 2


@pytest.mark.compiled("ATen computes complex numbers")
@pytest.mark.parametrize("view", ["conj", "neg view of complex", "neg view of conj", "twice"])
@pytest.mark.parametrize("sizes", [(), (3,), (4, 5)])
@pytest.mark.parametrize("program", [parts_of_a_copy, parts_of_a_resolved, parts_of_a_clone])
def test_a_copy_of_an_input_with_a_bit_has_none(program, sizes, view):
    vitrify.reset()
    compiled, z = vitrify.compile(program), VIEWS[view](number(torch.complex128, *sizes))
    for _ in range(2):
        torch.testing.assert_close(compiled(z), program(z), rtol=0, atol=0)
    assert vitrify.counters["fallbacks"] == vitrify.counters["eager_calls"] == 0
