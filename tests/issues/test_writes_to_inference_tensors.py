"""Tensors that were made in inference mode count no versions: outside of it eager's in-place ops raise, those of lists and of libraries too."""
import pytest
import torch
import vitrify

LIBRARY = torch.library.Library("writes_to_inference", "DEF")
LIBRARY.define("inc(Tensor(a!) x) -> ()")
LIBRARY.impl("inc", lambda x: (x.add_(1), None)[1], "CPU")
LIBRARY.define("incl(Tensor(a!)[] x) -> ()")
LIBRARY.impl("incl", lambda x: ([t.add_(1) for t in x], None)[1], "CPU")

WRITES = {
    "foreach": lambda own, other: torch._foreach_mul_([own, other], 2.0),
    "foreach, the second": lambda own, other: torch._foreach_add_([other, own], [other.clone(), own.clone()]),
    "library": lambda own, other: torch.ops.writes_to_inference.inc(own),
    "library, a list": lambda own, other: torch.ops.writes_to_inference.incl([own]),
}


def outcome(f):
    with torch.inference_mode():
        own = torch.ones(3)
    other = torch.ones(3)
    with torch.no_grad():
        try:
            f(own, other)
            error = ""
        except RuntimeError as e:
            error = str(e).partition("\n")[0]
    return error, own.tolist(), other.tolist()


@pytest.mark.no_kernels("the program raises")
@pytest.mark.parametrize("name", WRITES)
def test_they_raise(name):
    expected = outcome(WRITES[name])
    assert "inference" in expected[0].lower()
    assert outcome(vitrify.compile(WRITES[name])) == expected


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_their_mode_they_write(mode):
    def f(a, b):
        torch._foreach_mul_([a, b], 2.0)
        return a + b

    results = []
    for call in (f, vitrify.compile(f, fullgraph=True)):
        with mode():
            a, b = torch.ones(3), torch.ones(3)
            results.append((call(a, b).tolist(), a.tolist(), b.tolist()))
    assert results[0] == results[1]
