"""Products of elements that no kernel of ours knows, behind custom ops: the results, or the error, are eager's."""
import pytest
import torch
import vitrify

lib = torch.library.Library("opaque_products", "DEF")
DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32, torch.uint16, torch.uint32, torch.uint64, torch.bits8]


def cast(x, dtype):
    return (x * 4).to(torch.uint8).view(torch.bits8) if dtype is torch.bits8 else x.to(dtype)


for k, dtype in enumerate(DTYPES):
    lib.define(f"to{k}(Tensor x) -> Tensor")
    lib.impl(f"to{k}", (lambda dtype: lambda x: cast(x, dtype))(dtype), "CPU")
    lib.impl(f"to{k}", (lambda dtype: lambda x: x.new_empty(x.shape, dtype=dtype))(dtype), "Meta")
ONE = torch.tensor(1.0)
PROGRAMS = {
    "mm": lambda a: a.mm(a),
    "matmul": lambda a: a @ a,
    "bmm": lambda a: a.view(1, 16, 16).bmm(a.view(1, 16, 16)),
    "addmm": lambda a: torch.addmm(a[0], a, a),
    "baddbmm": lambda a: torch.baddbmm(a.view(1, 16, 16), a.view(1, 16, 16), a.view(1, 16, 16)),
    "linear": lambda a: torch.nn.functional.linear(a, a),
    "dot": lambda a: a[0].dot(a[0]),
    "scaled": lambda a: torch._scaled_mm(a, a.t(), ONE, ONE, out_dtype=torch.float32) + 1,
    "scaled, in bf16": lambda a: torch._scaled_mm(a, a.t(), ONE, ONE, out_dtype=torch.bfloat16) + 1,
    "scaled, as they are": lambda a: torch._scaled_mm(a, a.t(), ONE, ONE, ONE, out_dtype=a.dtype),
    "cast": lambda a: a.float() + 1,
    "cast of a product": lambda a: (a.float() @ a.float()).to(a.dtype),
    "of other types": lambda a: a @ torch.ones(16, 16),
    "added": lambda a: a + a,
    "cat": lambda a: torch.cat([a, a]),
    "copied": lambda a: torch.empty_like(a).copy_(a),
    "expanded": lambda a: a[:1].expand(3, 16).clone(),
    "written": lambda a: a.clone().fill_(1),
    "masked": lambda a: torch.where(torch.ones(16, 16) > 0, a, a),
    "indexed": lambda a: a[torch.tensor([1, 0])],
    "stacked": lambda a: torch.stack([a, a]).sum(0),
    "convolved": lambda a: torch.nn.functional.conv2d(a.view(1, 1, 16, 16), a[:3, :3].reshape(1, 1, 3, 3)),
    "mutated": lambda a: a.clone().add_(1),
}


def outcome(f, x):
    try:
        t = f(x)
    except Exception as e:
        return type(e), str(e).partition("\n")[0]
    return t.dtype, t.shape, t.stride(), t.contiguous().view(torch.uint8).tolist()


@pytest.mark.judged("what is said of a program holds only for some")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("k", range(len(DTYPES)), ids=[str(d)[6:] for d in DTYPES])
def test_products(k, program):
    op = getattr(torch.ops.opaque_products, f"to{k}")
    for of in (op, lambda x: cast(x + 1, DTYPES[k])):
        fn = lambda x: program(of(x))
        compiled = vitrify.compile(fn)
        with torch.no_grad():
            for _ in range(3):
                x = torch.rand(16, 16)
                assert outcome(compiled, x) == outcome(fn, x)
