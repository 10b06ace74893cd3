"""An integer that went through a float does not come back as its own low bits."""
import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify


def test_integers_through_floats_that_do_not_fit():
    x = torch.tensor([1, -7, 2**31 - 1, -(2**31), 2**31, 2**40 + 3, -(2**40) - 3, 2**62 + 5] * 9)

    def f(x):
        return x.double().to(torch.int32), x.float().to(torch.int32), x.double().to(torch.int64)
    before = vitrify.counters["kernels_launched"]
    ours, eager = vitrify.compile(f, fullgraph=True)(x), f(x)
    assert vitrify.counters["kernels_launched"] > before
    for a, b in zip(ours, eager):
        assert torch.equal(a, b), (a, b)


VALUES = [[float("nan")], [float("inf"), 3.0] * 20, [-float("inf")], [3e9], [1e20], [-3e9] * 3, [300.0, -300.0], [float("nan")] * 20]
REDUCTIONS = {
    "sum": lambda x, t: x.sum(-1, dtype=t), "prod": lambda x, t: x.prod(-1, dtype=t), "sum of all": lambda x, t: x.sum(dtype=t), "prod of all": lambda x, t: x.prod(dtype=t),
    "sum of columns": lambda x, t: x[None].expand(3, len(x)).sum(0, dtype=t), "cumsum": lambda x, t: x.cumsum(-1, dtype=t), "long": lambda x, t: x.repeat(3000).sum(dtype=t),
}


@pytest.mark.compiled("ATen computes running sums")
@pytest.mark.parametrize("to", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_what_is_summed_as_integers_is_converted_to_their_type_first(name, to):
    """It went to int64, in which what no int32 holds is another number."""
    for source in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        compiled = vitrify.compile(lambda x: REDUCTIONS[name](x, to))
        for values in VALUES:
            x = torch.tensor(values).to(source)
            assert torch.equal(compiled(x), REDUCTIONS[name](x, to)), (source, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_numbers_in_a_row_are_eagers(dtype):
    """To the bit: ATen's vectors round each step, by how wide they are."""
    def program():
        rows = [torch.arange(a, b, s, dtype=dtype) for a, b, s in ((-1, 1, 0.1), (0, 100, 0.7), (5, -3, -0.11), (0, 3000, 2), (10, -3000, -1), (0.0, 100.0, 2.0))]
        rows += [torch.linspace(a, b, n, dtype=dtype) for a, b, n in ((-1, 1, 20), (0, 1, 7), (0, 1000, 100), (2, 2, 5), (3, -1, 1))]
        return [r * 2 for r in rows]
    for a, b in zip(vitrify.compile(program)(), program()):
        assert torch.equal(a, b)


@pytest.mark.no_kernels("the program raises")
@pytest.mark.eager("aten::linear of two dtypes", some=True)
@pytest.mark.eager("aten::addmm of two dtypes", some=True)
@pytest.mark.filterwarnings("ignore:.*of two dtypes")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_layer_refuses_another_type_though_nobody_reads_it(mode):
    net = torch.nn.Linear(16, 8)

    def program(x):
        net(x)
        return x.exp()
    with mode():
        for f in (program, vitrify.compile(program)):
            with pytest.raises(RuntimeError, match="must have the same dtype, but got Half and Float"):
                f(torch.randn(7, 16).half())


INF, NAN = float("inf"), float("nan")
CHOSEN = {
    "masked_fill": lambda x, m, to: x.masked_fill(m, INF).to(to), "not the mask": lambda x, m, to: x.masked_fill(~m, torch.finfo(x.dtype).min).to(to), "where": lambda x, m, to: torch.where(m, x * 10, NAN).to(to), "the other way": lambda x, m, to: torch.where(m, 1e20, x).to(to),
    "negated": lambda x, m, to: (-torch.where(m, x, INF)).to(to), "divided": lambda x, m, to: (torch.where(m, 1.0, 0.0) / 0).to(to), "full": lambda x, m, to: torch.full_like(x, INF).to(to), "triangle": lambda x, m, to: torch.full((4, 4), -INF).triu(1).to(to),
    "pad": lambda x, m, to: F.pad(x, (1, 1), value=INF).to(to), "sum": lambda x, m, to: x.masked_fill(m, INF).to(to).sum(), "a scalar": lambda x, m, to: torch.tensor(1e20).to(to) + m.to(to),
    "copied": lambda x, m, to: torch.zeros(4, dtype=to).copy_(x.masked_fill(m, INF)), "integers before": lambda x, m, to: (torch.where(m, 2**33 + 5, 7).double() + 0).to(to), "floor": lambda x, m, to: torch.where(m, 2**33 + 5, 7).double().floor().to(to),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("to", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("name", CHOSEN)
def test_integers_of_what_no_integer_holds(name, to, source):
    """The compiler took the other side of the choice for it."""
    x = torch.tensor([1.5, 2.5, -3.5, 4.0], dtype=source)
    compiled = vitrify.compile(lambda x, m: CHOSEN[name](x, m, to))
    expects.no_kernels("nothing but constants", some=True)
    for mask in (x > 2, x < 0):
        assert torch.equal(compiled(x, mask), CHOSEN[name](x, mask, to))
