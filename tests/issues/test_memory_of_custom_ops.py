"""Where in its memory lies what a custom op gives, and with which bits: no description says so, and programs look at it."""
import pytest
import torch
import vitrify

lib = torch.library.Library("memory_of_custom_ops", "DEF")
CALLS = [0]


def pool(x, at):
    CALLS[0] += 1
    return torch.arange(100.0, dtype=x.dtype)[at:at + x.numel()].view(x.shape)


GIVEN = {
    "a part": (lambda x: pool(x, 10), torch.empty_like),
    "an odd part": (lambda x: pool(x, 11), torch.empty_like),
    "the beginning": (lambda x: pool(x, 0), torch.empty_like),
    "a part, as described": (lambda x: pool(x, 10), lambda x: x.new_empty(100)[10:10 + x.numel()].view(x.shape)),
    "another each time": (lambda x: pool(x, 8 * CALLS[0]), torch.empty_like),
    "of its own": (lambda x: x * 2, torch.empty_like),
}
OPS = {}
for k, (name, (kernel, description)) in enumerate(GIVEN.items()):
    lib.define(f"op{k}(Tensor x) -> Tensor")
    lib.impl(f"op{k}", kernel, "CPU")
    lib.impl(f"op{k}", description, "Meta")
    OPS[name] = getattr(torch.ops.memory_of_custom_ops, f"op{k}")
LOOKS = {
    "as_strided": lambda t: t.as_strided((3,), (1,), 0) + 1,
    "as_strided of a view": lambda t: t[1:].as_strided((3,), (1,), 1) + 1,
    "as_strided_copy": lambda t: torch.as_strided_copy(t, (3,), (1,), 0) + 1,
    "as_strided_scatter": lambda t: torch.as_strided_scatter(t, t[0, :2], (2,), (1,), 1) + 1,
    "as_strided from where it begins": lambda t: t.as_strided((3,), (2,)) + 1,
    "as_strided behind it": lambda t: t.as_strided((20,), (1,)) + 1,
    "after a write": lambda t: t.add_(1).as_strided((3,), (1,), 0) + 1,
    "a write through it": lambda t: (t.as_strided((3,), (1,), 0).add_(5), t + 1)[1],
    "offset": lambda t: torch.ones(3) * t.storage_offset(),
    "offset of a view": lambda t: torch.ones(3) * t[1:].storage_offset(),
    "offset, detached": lambda t: torch.ones(3) * t.detach().storage_offset(),
    "bytes": lambda t: torch.ones(3) * t.untyped_storage().nbytes(),
    "wider": lambda t: t.view(torch.int64) + 1,
    "narrower": lambda t: t.view(torch.int16) + 1,
    "complex": lambda t: torch.view_as_complex(t.view(-1, 2)).real + 1,
    "scattered": lambda t: t.slice_scatter(t[1:] + 1, 0, 1).as_strided((3,), (1,), 0) + 1,
    "resized": lambda t: t.resize_(20)[:16] + 1,
    "as it is": lambda t: t,
    "a view of it": lambda t: (t[1:], t + 1)[0],
}


def outcome(f, x):
    CALLS[0] = 0
    try:
        t = f(x)
    except RuntimeError as e:
        return str(e).partition("\n")[0], CALLS[0]
    return str(t), t.stride(), t.dtype, CALLS[0]


def described(t):
    return t if isinstance(t, tuple) else (t,)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.judged("what is said of a program holds only for some")
def test_memory_of_its_own(op, look, grad, dynamic):
    program = lambda x: look(op(x))
    compiled = vitrify.compile(program, dynamic=dynamic)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            x = torch.randn(4, 4)
            assert outcome(compiled, x) == outcome(program, x)


# Where an op's results lie is remembered: this one's nobody has seen yet.
lib.define("unseen(Tensor x) -> Tensor")
lib.impl("unseen", GIVEN["a part"][0], "CPU")
lib.impl("unseen", torch.empty_like, "Meta")


@pytest.mark.eager("is a part of its memory, which the program looks at", "aten::as_strided counts from the beginning of memory that shows in part only")
@pytest.mark.no_kernels("eager serves it")
def test_it_says_so():
    program = lambda x: torch.ops.memory_of_custom_ops.unseen(OPS["of its own"](x) + 1).as_strided((3,), (1,), 0) + 1
    compiled = vitrify.compile(program)
    for _ in range(3):
        x = torch.randn(4, 4)
        assert outcome(compiled, x) == outcome(program, x)


def test_nobody_looks():
    """Kernels run, whatever memory it is."""
    program = lambda x: OPS["an odd part"](x)[1:] * 2 + OPS["another each time"](x).as_strided((3, 4), (4, 1))
    compiled, before = vitrify.compile(program, fullgraph=True), vitrify.counters["kernels_launched"]
    for _ in range(3):
        x = torch.randn(4, 4)
        assert outcome(compiled, x) == outcome(program, x)
    assert vitrify.counters["kernels_launched"] > before and not vitrify.counters["eager_calls"]


def test_of_its_own_is_compiled():
    program = lambda x: OPS["of its own"](x).as_strided((3,), (1,), 0) + OPS["of its own"](x).view(torch.int64).float()[0, 0]
    compiled, before = vitrify.compile(program, fullgraph=True), vitrify.counters["kernels_launched"]
    for _ in range(3):
        x = torch.randn(4, 4)
        assert outcome(compiled, x) == outcome(program, x)
    assert vitrify.counters["kernels_launched"] > before and not vitrify.counters["eager_calls"]


lib.define("expanded(Tensor x) -> Tensor")
lib.impl("expanded", lambda x: x[:, :1].clone().expand(x.shape), "CPU")
lib.impl("expanded", lambda x: x.new_empty(x.shape[0], 1).expand(x.shape), "Meta")


@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[1:], lambda t: t.unsqueeze(0), lambda t: (t[0], t.t())[1], lambda t: t.view(2, 2, 4)])
@pytest.mark.eager("returns a tensor that overlaps itself")
def test_a_view_of_an_expanded_result(view):
    program = lambda x: (view(torch.ops.memory_of_custom_ops.expanded(x)), x + 1)
    compiled = vitrify.compile(program)
    for _ in range(2):
        x = torch.randn(4, 4)
        ours, eager = compiled(x)[0], program(x)[0]
        assert torch.equal(ours, eager) and ours.stride() == eager.stride()


TURNED = {"conj": lambda z: z.conj(), "imag of conj": lambda z: z.conj().imag, "negative": lambda z: z.real._neg_view(), "both": lambda z: z.conj()._neg_view()}
for k, (name, kernel) in enumerate(TURNED.items()):
    lib.define(f"turned{k}(Tensor x) -> Tensor")
    lib.impl(f"turned{k}", (lambda kernel: lambda x: kernel(x * 2))(kernel), "CPU")
    lib.impl(f"turned{k}", (lambda kernel: lambda x: torch.empty_like(kernel(x)) if kernel(x).dtype != x.dtype else torch.empty_like(x))(kernel), "Meta")
    lib.define(f"told{k}(Tensor x) -> Tensor")
    lib.impl(f"told{k}", (lambda kernel: lambda x: kernel(x * 2))(kernel), "CPU")
    lib.impl(f"told{k}", (lambda kernel: lambda x: kernel(torch.empty_like(x)))(kernel), "Meta")
AFTER = {"as it is": lambda t: t, "bits": lambda t: (t.resolve_conj().resolve_neg() + 1, t.is_conj(), t.is_neg()), "times": lambda t: t * 2, "sum": lambda t: t.sum(),
         "view": lambda t: t.view(-1), "real": lambda t: torch.view_as_real(t.resolve_neg()) if t.is_complex() else t.abs()}


def bits(r):
    return [(t.resolve_conj().resolve_neg().tolist(), t.is_conj(), t.is_neg(), t.stride()) if isinstance(t, torch.Tensor) else t for t in described(r)]


@pytest.mark.judged("what is said of a program holds only for some")
@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER)
@pytest.mark.parametrize("said", ["turned", "told"])
@pytest.mark.parametrize("k", range(len(TURNED)), ids=list(TURNED))
def test_bits_of_what_it_gives(k, said, after):
    op = getattr(torch.ops.memory_of_custom_ops, f"{said}{k}")

    def program(z):
        try:
            return after(op(z))
        except RuntimeError as e:
            return str(e).partition("\n")[0]
    compiled = vitrify.compile(program)
    with torch.no_grad():
        for _ in range(3):
            z = torch.randn(3, 4, dtype=torch.complex64)
            assert bits(compiled(z)) == bits(program(z))


lib.define("asks(Tensor x) -> Tensor")
lib.impl("asks", lambda x: torch.tensor([x.is_conj(), x.is_neg(), x.is_contiguous()]) * 1.0, "CPU")
lib.impl("asks", lambda x: torch.empty(3, device="meta"), "Meta")


@pytest.mark.parametrize("of", [*TURNED.values(), lambda z: z, lambda z: (z * 2).conj().imag, lambda z: (z.real * 2)._neg_view()[1:]])
@pytest.mark.judged("what is said of a program holds only for some")
def test_bits_of_what_it_is_given(of):
    program = lambda z: torch.ops.memory_of_custom_ops.asks(of(z)) + 1
    compiled = vitrify.compile(program)
    for _ in range(3):
        z = torch.randn(3, 4, dtype=torch.complex64)
        assert torch.equal(compiled(z), program(z))
