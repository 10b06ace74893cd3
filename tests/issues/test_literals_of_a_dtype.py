"""torch.scalar_tensor of a literal: item(), passes and checks look at the number that a tensor of that dtype holds of it."""
import beside
import expects
import pytest
import torch
import vitrify

T, S = torch, torch.scalar_tensor


@pytest.mark.parametrize("text", ["x * (y * S(1.5, dtype=T.int64)).item()", "x * (y * S(-2.9, dtype=T.int8)).item()", "x * (y * S(2.0, dtype=T.bool)).item()", "x * (y * S(0.1, dtype=T.float16)).item()",
                                  "x * (y * S(0.1, dtype=T.float16).float()).item()", "x * (y.double() * S(0.1, dtype=T.float32)).item()", "x * (y * S(0.1, dtype=T.bfloat16).clone()).item()", "x * (y - S(2.9, dtype=T.uint8)).item()",
                                  "x + 1 if (y * S(1.5, dtype=T.int64)).item() > 4 else x - 1", "x * (y * S(2, dtype=T.int32)).item()", "x * (y * S(3, dtype=T.bool)).item()"])
def test_numbers(text):
    beside.check(beside.program(f"return {text}", S=S, T=T), lambda: [torch.ones(2), torch.tensor(3.0)])


@pytest.mark.parametrize("text", ["x * S(0.9, dtype=T.int64)", "x + S(200, dtype=T.uint8)", "x * S(0.1, dtype=T.bfloat16)", "x ** S(2.5, dtype=T.int32)", "x.where(x > S(0.7, dtype=T.int8), y)", "x + S(2, dtype=T.bool)", "S(0.1, dtype=T.float16) * x.half()", "x.clamp(S(0.9, dtype=T.int64), S(1.9, dtype=T.int64))", "x + S(2 ** 53 + 1, dtype=T.int64)",
                                  "x + S(0.1)", "T.scalar_tensor(0.1, dtype=T.float64) + x", "(S(0.3, dtype=T.int64) + 1).float() * x"])
def test_operands(text):
    beside.check(beside.program(f"return {text}", S=S, T=T), lambda: [torch.tensor([0.5, 1.5, -2.5]), torch.tensor([3.0, 1.0, 2.0])])


def test_written():
    beside.check(beside.program("s = S(1.9, dtype=T.int64); s.add_(1); return x * s, s", S=S, T=T), lambda: [torch.ones(2)])


@pytest.mark.parametrize("literal", [0.9, 0.5, 1e-6])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float64])
def test_softmax_over_edges(literal, dtype):
    def f(x, e, logits):
        n = x.shape[0]
        top = torch.zeros(n).scatter_reduce(0, e[1], logits, "amax", include_self=False)
        weights = (logits - top.index_select(0, e[1])).exp()
        total = torch.zeros(n).scatter_add(0, e[1], weights) + S(literal, dtype=dtype)
        return torch.zeros_like(x).scatter_add(0, e[1].view(-1, 1).expand(-1, x.shape[1]), x.index_select(0, e[0]) * (weights / total.index_select(0, e[1]))[:, None])

    def make():
        g = torch.Generator().manual_seed(1)
        return [torch.randn(30, 8, generator=g), torch.randint(0, 30, (2, 200), generator=g), torch.randn(200, generator=g)]
    beside.check(f, make, launches=False)


@pytest.mark.parametrize("text", ["x // 256", "x % 256", "x // -256", "x // 512", "x % S(256, dtype=T.int64)", "torch.floor_divide(x, 256)", "x.fmod(256)", "x // 255", "x // 1", "torch.div(x, 256, rounding_mode='trunc')"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int64])
def test_unused_divisions(text, dtype):
    """256 is 0 to eight bits."""
    f = beside.program(f"return ({text}, x + 1)[1]", S=S, T=T)

    def told(run):
        try:
            return run(torch.tensor([1, 5, 100], dtype=dtype)).tolist()
        except RuntimeError as e:
            return str(e)
    with torch.no_grad():
        eager = told(f)
        if isinstance(eager, str):
            expects.no_kernels("the program raises")
        assert told(vitrify.compile(f, fullgraph=True)) == eager


def test_what_a_literal_cannot_be():
    beside.check(beside.program("return x + S(300, dtype=T.uint8)", S=S, T=T), lambda: [torch.ones(2)], reason="")
    beside.check(beside.program("return x * S(1 + 2j, dtype=T.complex64)", S=S, T=T), lambda: [torch.ones(2)], launches=False)
