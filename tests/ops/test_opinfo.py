"""A subset of torch's op database on every run; all of it with ./x test --all (tests/ops/run_opinfo.py writes the report)."""
import argparse
import queue
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import compare  # noqa: E402
import opinfo  # noqa: E402
import run_opinfo  # noqa: E402

QUICK = {
    "add", "sub", "mul", "div.no_rounding_mode", "div.floor_rounding", "remainder", "pow", "exp", "log", "log1p", "expm1", "sin", "tanh", "sigmoid", "erf", "sqrt", "rsqrt",
    "abs", "neg", "sign", "floor", "round", "clamp", "where", "maximum", "eq", "lt", "logical_and", "bitwise_and", "isnan", "nan_to_num",
    "nn.functional.relu", "nn.functional.gelu", "nn.functional.silu", "nn.functional.softplus", "nn.functional.layer_norm", "nn.functional.batch_norm",
    "nn.functional.linear", "nn.functional.embedding", "nn.functional.dropout", "softmax", "log_softmax", "sum", "mean", "amax", "argmax", "var", "std", "prod", "any", "all",
    "cumsum", "matmul", "mm", "bmm", "addmm", "cat", "stack", "split", "chunk", "view", "reshape", "permute", "transpose", "expand", "squeeze", "unsqueeze", "select", "narrow",
    "index_select", "gather", "scatter", "scatter_add", "index_put", "masked_fill", "tril", "flip", "roll", "arange", "full_like", "zeros_like", "contiguous", "clone", "to",
}
# Of these, those that run no kernel of ours: what gives views alone, and what ATen computes (as the op alone: no other work to fuse with).
VIEWS = {"chunk", "expand", "narrow", "permute", "reshape", "select", "split", "squeeze", "transpose", "unsqueeze", "view"}
ATEN = {"addmm", "argmax", "bmm", "cumsum", "scatter"}
OPS = {}
for _op in opinfo.database():
    OPS.setdefault(opinfo.name_of(_op), _op)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(QUICK))
def test_op(name):
    result = opinfo.run_op(OPS[name], dtypes=("float32", "int64"), samples=3)
    assert result.failures == []
    assert result.passed == result.samples > result.unclear == 0
    opinfo.without_kernels(result, name in VIEWS | ATEN)


@pytest.mark.no_kernels("nothing is compiled")
def test_a_wrong_value_is_found():
    x = torch.randn(64)
    reference = x.double().exp()
    compare.check_value("out", x.exp(), x.exp(), reference)
    with pytest.raises(compare.Mismatch):
        compare.check_value("out", x.exp() * (1 + 3e-6), x.exp(), reference)
    with pytest.raises(compare.Mismatch):
        compare.check_meta("out", torch.empty(2, 3).t(), torch.empty(3, 2))


@pytest.mark.no_kernels("nothing is compiled")
@pytest.mark.parametrize("end, says", [("os.abort()", "crashed the process (exit -6, after no other op): terminate called / Fatal Python error: Aborted"), ("time.sleep(60)", "no end in 1 s (exit -6, after no other op): ")])
def test_a_crash_and_a_hang_say_where(monkeypatch, tmp_path, end, says):
    (tmp_path / "worker.py").write_text(f"import faulthandler, os, sys, time\nfaulthandler.enable()\ninput()\nprint('terminate called', file=sys.stderr, flush=True)\n{end}\n")
    monkeypatch.setattr(run_opinfo, "__file__", str(tmp_path / "worker.py"))
    names, rows = queue.Queue(), []
    names.put("add")
    run_opinfo.serve(names, argparse.Namespace(dtypes="float32", samples=1, threads=1, grad=0, autocast=False, op_limit=1 if "sleep" in end else 60), time.time() + 60, rows.append)
    (text,) = rows[0]["failures"]
    assert text.startswith(says) and 'worker.py", line 5' in text and rows[0]["passed"] == 0


@pytest.mark.slow
@pytest.mark.eager("recorded ", "a value that the program reads is another", "a size that follows from content", some=True)  # first calls, which learn what ATen gives
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(set(OPS) - QUICK))
def test_every_op(name):
    result = opinfo.run_op(OPS[name], samples=opinfo.ALL)
    assert result.failures == []
    assert result.unclear <= result.samples // 2, f"{result.unclear} of {result.samples} samples say nothing"
    assert [part for part in opinfo.EAGER.get(name, ()) if not any(part in why for why in result.reasons)] == [], "no sample runs eagerly for these reasons any more"
    opinfo.without_kernels(result, None)
