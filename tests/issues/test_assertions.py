"""pytest rewrites the assertions of a test's file: what they call, and the state behind it, is none of the program's."""
import sys

import pytest
import torch
import vitrify


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_program_with_an_assertion_imports_something(tmp_path, monkeypatch, grad):
    """pytest's import hook notes each module that it sees for the first time."""
    name = f"vitrify_imported_{grad}"
    (tmp_path / f"{name}.py").write_text("factor = 3.0\n")
    monkeypatch.syspath_prepend(tmp_path)

    def fn(x):
        module = __import__(name)
        assert module.factor == 3.0 and x.dim() == 1
        return (x * module.factor).sin()
    compiled, x = vitrify.compile(fn), torch.ones(3, requires_grad=grad)
    before = dict(vitrify.counters)
    y = compiled(x)
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    assert did["captures"] == did["compiled_calls"] == 1 and did["eager_calls"] == 0 and did["kernels_launched"] > 0
    torch.testing.assert_close(y, fn(x))
    sys.modules.pop(name)


WRONG = {"a type": (None, None, torch.float64), "sizes": ([9], None, None), "dims": ([3, 1], None, None), "strides": (None, [2], None), "a type among what is right": ([3], [1], torch.int32)}


@pytest.mark.parametrize("name", WRONG)
def test_what_exported_programs_assert_of_tensors(name):
    """It was dropped unseen."""
    def f(x, *said):
        torch._assert_tensor_metadata(x * 1, *said)
        return x * 2
    x, compiled = torch.ones(3), vitrify.compile(f)
    assert torch.equal(compiled(x, [3], [1], torch.float32), f(x)) and torch.equal(compiled(torch.ones(5), [5], None, None), f(torch.ones(5)))
    for _ in range(2):
        with pytest.raises(RuntimeError) as eager:
            f(x, *WRONG[name])
        with pytest.raises(RuntimeError) as ours:
            compiled(x, *WRONG[name])
        assert str(ours.value) == str(eager.value)
