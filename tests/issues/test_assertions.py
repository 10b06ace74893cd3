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
