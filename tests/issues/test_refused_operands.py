"""Kernels that take less than their Meta kernels: what eager raises for dtypes, numbers and sizes comes also where nobody reads the result."""
import pytest
import torch
import torch.nn.functional as F
import vitrify

A = torch.arange
REFUSED = {
    "pow": (lambda x: x ** -1, (torch.int64, torch.uint8, torch.bool)),
    "sub": (lambda x: x - x, (torch.bool,)),
    "rsub": (lambda x: 1 - x, (torch.bool,)),
    "logaddexp": (lambda x: torch.logaddexp(x, x), (torch.int64, torch.bool)),
    "and": (lambda x: x & x, (torch.float32, torch.half, torch.bfloat16)),
    "lerp": (lambda x: torch.lerp(x, x, 0.5), (torch.int64, torch.bool)),
    "var": (lambda x: x.var(), (torch.int64, torch.bool)),
    "std": (lambda x: x.std(0), (torch.uint8,)),
    "max of nothing": (lambda x: x[:0].max(), (torch.float32, torch.int64, torch.bool, torch.complex64)),
    "min of nothing": (lambda x: x[:0].min(0), (torch.float32, torch.bool)),
    "mm": (lambda x: x[None] @ x[:, None], (torch.bool,)),
    "dot": (lambda x: x.dot(x), (torch.bool,)),
    "linear": (lambda x: F.linear(x, x[None]), (torch.bool,)),
    "fill_": (lambda x: x.clone().fill_(1j), (torch.float32, torch.half, torch.int64)),
    "hypot": (lambda x: torch.hypot(x, x), (torch.int64,)),
    "nextafter": (lambda x: torch.nextafter(x, x), (torch.int64,)),
    "sort": (lambda x: x.sort()[0], (torch.complex64,)),
    "topk": (lambda x: x.topk(2)[0], (torch.bool, torch.complex64)),
    "argmax": (lambda x: x.argmax(), (torch.bool, torch.complex64)),
    "addcmul": (lambda x: torch.addcmul(x, x, x), (torch.bool,)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x[None, None].repeat(1, 3, 1), 2), (torch.uint8,)),
    "max_pool1d": (lambda x: F.max_pool1d(x[None, None], 2), (torch.int64, torch.uint8)),
}
CASES = [(op, dtype) for op, (_, dtypes) in REFUSED.items() for dtype in dtypes]


def outcome(f, x, inference):
    with torch.inference_mode() if inference else torch.no_grad():
        try:
            return f(x.clone())
        except Exception as e:
            return type(e), str(e).partition("\n")[0]


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference"])
@pytest.mark.parametrize("live", [False, True], ids=["dead", "live"])
@pytest.mark.parametrize("op, dtype", CASES, ids=[f"{op}-{str(dtype)[6:]}" for op, dtype in CASES])
@pytest.mark.judged("every case is an error of eager's")
def test_what_a_kernel_refuses(op, dtype, live, inference):
    fn = REFUSED[op][0]
    program = fn if live else lambda x: (fn(x), torch.cat([x, x]))[1]
    x = A(3).to(dtype)
    compiled = vitrify.compile(program)
    eager = outcome(program, x, inference)
    assert isinstance(eager, tuple) and [outcome(compiled, x, inference) for _ in range(2)] == [eager] * 2


LARGE = [(op, dtype) for op, dtype in CASES if op in ("logaddexp", "and", "lerp", "var", "std", "hypot", "nextafter", "sort", "argmax", "addcmul")]


@pytest.mark.parametrize("op, dtype", LARGE, ids=[f"{op}-{str(dtype)[6:]}" for op, dtype in LARGE])
@pytest.mark.judged("every case is an error of eager's")
def test_what_a_kernel_refuses_of_large_operands(op, dtype):
    """More elements than kernels are asked with: small ones were taken to be refused for their size."""
    def program(x):
        return REFUSED[op][0](x), torch.cat([x, x])
    x = torch.ones((1 << 20) + 3).to(dtype)
    eager = outcome(program, x, False)
    assert isinstance(eager[0], type) and outcome(vitrify.compile(lambda x: program(x)[1]), x, False) == eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_a_kernel_takes_of_large_operands(dtype):
    w = torch.ones(8, 4, 5, 5, dtype=dtype)

    def program(x):
        F.conv2d(x, w), F.max_pool2d(x, 3), F.avg_pool2d(x, 2), F.pad(x, (3, 3, 3, 3), mode="reflect"), F.interpolate(x, scale_factor=0.5), x.sort(), x.var(), x.topk(30)
        F.conv2d(x, w, stride=20, dilation=3), x.unfold(3, 100, 7)
        return x.relu() + 1
    x = torch.randn(2, 4, 400, 400).to(dtype)
    with torch.no_grad():
        assert torch.equal(vitrify.compile(program)(x), x.relu() + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.half])
def test_what_a_kernel_takes_runs_natively(dtype, recwarn):
    def program(x):
        x + x, x * 2, x.sum(), x > 1, x[None] == x[:, None], x.amax(), x.float().var(), x.float()[None] @ x.float()[:, None], x.float().softmax(0), x // 2
        return x.float().sin()
    x = A(5).to(dtype)
    assert torch.allclose(vitrify.compile(program)(x), program(x), atol=1e-6)
    assert not recwarn.list


@pytest.mark.no_kernels("eager raises")
def test_kernels_are_asked_before_anything_is_written():
    def program(x, y):
        x.add_(1)
        y ** -1
        return x * 2
    x, y = torch.ones(3), A(3)
    for f in (program, vitrify.compile(program)):
        given = x.clone()
        with pytest.raises(RuntimeError, match="negative integer powers"):
            f(given, y)
        assert torch.equal(given, torch.full((3,), 2.0)) and given._version == 1


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("make", [lambda: torch.randn(4, 6, 3).transpose(1, 2), lambda: torch.randn(6, 5).t(), lambda: torch.randn(3, 8, 2).permute(2, 0, 1), lambda: torch.randn(2, 1, 9)],
                         ids=["transposed", "t", "permuted", "dense"])
def test_pooled_memory_is_contiguous(make, grad, dynamic):
    def program(x):
        return F.max_pool1d(x, 2), F.max_pool1d(x, 2).sin()
    x = make().requires_grad_(grad)
    compiled = vitrify.compile(program, dynamic=dynamic)
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            for a, b in zip(compiled(x), program(x)):
                torch.testing.assert_close(a, b)
                assert a.stride() == b.stride()


PLACES = {
    "too many": (lambda x, v: x.index_put((torch.tensor([0, 1]),), v[:3], accumulate=True)),
    "too many dims": (lambda x, v: x.index_put((torch.tensor([0, 1]),), v[:2].view(1, 2), accumulate=True)),
    "of whole dims": (lambda x, v: torch.ops.aten.index_put(x.view(3, 4), (None, torch.tensor([1])), v[:4].view(4, 1), True)),
    "in place": (lambda x, v: x.clone().index_put_((torch.tensor([[0], [1]]),), v[:6].view(2, 3), accumulate=True)),
}


@pytest.mark.parametrize("dynamic", [None, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.judged("every case is an error of eager's")
def test_values_that_do_not_fit_where_they_are_written(name, dynamic):
    """The rule of shapes looked at what is written to and no further: a kernel read past the values, or left some out."""
    fn = PLACES[name]
    compiled = vitrify.compile(fn, dynamic=dynamic)
    for _ in range(2):
        errors = []
        for f in (fn, compiled):
            with pytest.raises(RuntimeError) as e:
                f(torch.zeros(12), A(12.0))
            errors.append(str(e.value).partition("\n")[0])
        assert errors[0] == errors[1]


@pytest.mark.parametrize("dynamic", [None, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.judged("most cases are errors of eager's")
def test_weights_of_other_classes(reduction, dynamic):
    """A kernel read past the weights."""
    def fn(x, w):
        return F.nll_loss(x, torch.tensor([0, 1, 2, 5]), w, reduction=reduction)
    compiled = vitrify.compile(fn, dynamic=dynamic)
    x = A(24.0).view(4, 6)
    for w in (A(6.0), A(3.0), torch.ones(()), torch.ones(1), torch.ones(1, 6), A(7.0), A(6.0)):
        said = []
        for f in (fn, compiled):
            try:
                said.append(f(x, w).tolist())
            except RuntimeError as e:
                said.append(str(e).partition("\n")[0])
        assert said[0] == said[1]


NUMBERS = {
    **{f"smooth_l1, beta {beta}, {how}": (lambda x, beta=beta, how=how: F.smooth_l1_loss(x, x * 2, reduction=how, beta=beta)) for beta in (-1.0, float("nan")) for how in ("mean", "none")},
    **{f"{name} by reduction {n}": (lambda x, op=op, n=n: op(x, x * 2, n)) for name, op in {"mse": torch.ops.aten.mse_loss, "smooth_l1": lambda *a: torch.ops.aten.smooth_l1_loss(*a, 1.0)}.items() for n in (7, -1)},
    "strides of new memory": lambda x: torch.empty_strided((2,), (-1,)).fill_(1) * x[0], "strides of memory like it": lambda x: x.new_empty_strided((2, 3), (4, -1)).fill_(1) * x[0],
}


@pytest.mark.parametrize("size", [3, 3000])
@pytest.mark.parametrize("how", ["live", "dead", "caught"])
@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.judged("every case is an error of eager's")
def test_numbers_that_a_kernel_refuses(name, how, size):
    def program(x):
        x.add_(1)
        try:
            y = NUMBERS[name](x)
        except RuntimeError:
            if how != "caught":
                raise
            return x * 3
        return y if how == "live" else x * 2
    told = []
    for f in (program, vitrify.compile(program)):
        x = torch.ones(size)
        told.append((outcome(f, x, False), x))
    for eager, ours in zip(*told, strict=True):
        assert torch.is_tensor(eager) or eager == ours
        if torch.is_tensor(eager):
            torch.testing.assert_close(ours, eager)


CAUGHT = {
    "indices of another type": lambda x: x[torch.tensor([1.0, 2.0])], "indices of shorts": lambda x: x[torch.tensor([1, 2], dtype=torch.int16)], "indices that do not go together": lambda x: x.view(1, 3)[torch.tensor([0, 0]), torch.tensor([0, 1, 2])],
    "one of two statistics": lambda x: F.batch_norm(x.view(1, 3), torch.ones(3), None, training=True), "expanded to fewer dims": lambda x: x.view(1, 3).expand(4), "strides for other sizes": lambda x: x.as_strided((2,), (1, 1)),
    "a view": lambda x: x.view(5), "a product": lambda x: x.view(1, 3) @ x.view(1, 3), "joined": lambda x: torch.cat([x, x.view(1, 3)]), "a convolution": lambda x: F.conv2d(x, x), "a sum over dims": lambda x: x.sum(4), "no dims": lambda x: x.logsumexp(()),
    "a large one": lambda x: x.repeat(100000)[torch.tensor([1.0, 2.0])],
}


@pytest.mark.eager("which the program catches", some=True)
@pytest.mark.filterwarnings("ignore::vitrify.VitrifyWarning")
@pytest.mark.parametrize("name", CAUGHT)
def test_errors_that_the_program_catches(name):
    """Their type and text, which the program looks at, are eager's."""
    def program(x):
        try:
            return CAUGHT[name](x)
        except Exception as e:
            return x * len(str(e).partition("\n")[0]) + (1 if isinstance(e, IndexError) else 2 if isinstance(e, ValueError) else 3)
    compiled = vitrify.compile(program)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(compiled(torch.ones(3)), program(torch.ones(3)))
