"""Every option is read and changes something; a value that it cannot have is refused, with those that it can, wherever it is given."""
import os
import subprocess
import sys
import warnings

import expects
import pytest
import torch
import vitrify
from beside import plan_of
from torch import nn
from vitrify import _C


def data(*size):
    return torch.arange(1.0, 1 + torch.Size(size).numel()).reshape(size) / 7


def compiled(f, args=(data(8, 8),), **options):
    c = vitrify.compile(f, options=options, fullgraph=True)
    with torch.no_grad():
        c(*args)
    return c


def did(name, run):
    before = vitrify.counters[name]
    run()
    return vitrify.counters[name] - before


def two_kernels(x):
    return (x.sum(0) + 1).cumsum(0), x.exp().amax(1)


def dumped(folder, what, **options):
    compiled(two_kernels, dump=what, dump_dir=str(folder), **options)
    return "".join(p.read_text() for p in sorted(folder.iterdir()))


def recompile_limit(tmp_path):
    f = vitrify.compile(lambda x: x + 1, dynamic=False, options={"recompile_limit": 1})
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        assert did("eager_calls", lambda: (f(data(2)), f(data(3)))) == 1
    assert "recompile_limit=1" in str(log[0].message)


def error_on_recompile(tmp_path):
    f = vitrify.compile(lambda x: x + 1, options={"error_on_recompile": True})
    f(data(2))
    with pytest.raises(vitrify.RecompileError):
        f(data(3))


def fusion(tmp_path):
    launches = [did("kernels_launched", lambda: compiled(lambda x: (x.exp(), x.sum(1), x.sin().sum(1)), fusion=how)) for how in ("default", "off")]
    assert launches[0] < launches[1]


def disable(tmp_path):
    timed = []
    for names in ([], ["cse"], "cse, fuse"):
        vitrify.reset()
        compiled(lambda x: x.exp() + x.exp(), disable=names)
        timed.append("cse" in vitrify.metrics()["compile_us"])
    assert timed == [True, False, False]


def target(tmp_path):
    texts = []
    for name in ("native", "x86-64-v2"):
        (tmp_path / name).mkdir()
        texts.append(dumped(tmp_path / name, "llvm", target=name))
    assert '"target-cpu"="x86-64-v2"' in texts[1] and '"target-cpu"="x86-64-v2"' not in texts[0]


def threads(tmp_path):
    compiled(two_kernels)  # the first compile of a process has a unit of its own
    modules = []
    for n in (1, 2):
        (tmp_path / str(n)).mkdir()
        modules.append(dumped(tmp_path / str(n), "llvm", threads=n, fusion="off").count("ModuleID"))
    assert modules == [1, 2]


BAD_GRAPH = "graph @graph(%0: f32[s0] arg \"a\") syms(s0 hint=2) {\n  %1: f32[s0] = aten::relu(%0)\n  return %1\n}\n"


def verify(tmp_path):
    for on in (False, True):
        o = _C.Options()
        o.set("verify", on)
        if on:
            with pytest.raises(vitrify.CompilerError, match="may be negative"):
                _C.replay(BAD_GRAPH, o)
        else:
            assert "1 launches" in _C.replay(BAD_GRAPH, o)


def dump(tmp_path):
    for what, text in (("graph", "graph @"), ("loops", "kernel"), ("llvm", "define ")):
        (tmp_path / what).mkdir()
        assert text in dumped(tmp_path / what, [what])


def dump_dir(tmp_path):
    assert not list(tmp_path.iterdir())
    dumped(tmp_path, "graph")
    assert list(tmp_path.iterdir())


def backend(tmp_path):
    assert "define " not in dumped(tmp_path, "llvm", backend="interp")


def gemm(tmp_path):
    m = nn.Linear(512, 512)
    plans = []
    for library in ("aten", "onednn"):
        c = vitrify.compile(m, options={"gemm": library})
        with torch.no_grad():
            c(data(64, 512))
        plans.append(plan_of(c))
    assert "mkldnn" in plans[1] and "mkldnn" not in plans[0]


def memory_budget(tmp_path):
    kept = []
    for share in (1.0, 0.0):
        w = data(8, 8).requires_grad_()
        c = vitrify.compile(lambda x, w: (x @ w).sin().exp().mul(x @ x).sin().mul(x @ w).sum(0).cos(), options={"memory_budget": share})
        c(data(8, 8), w).sum().backward()
        kept.append(_C.state_entries(_C.installed_state(c))[0][0].stats["kept_bytes"])
    assert kept[1] < kept[0]


def packed_weight_mb(tmp_path):
    m = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    packed = []
    for size in (90, 0):
        def run():
            c = vitrify.compile(m, options={"packed_weight_mb": size, "gemm": "onednn"})
            with torch.no_grad():
                for _ in range(3):
                    c(data(64, 256))
        packed.append(did("weights_packed", run))
    assert packed[0] > packed[1] == 0


def winograd(tmp_path):
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("needs AVX-512")
    m, plans = nn.Conv2d(64, 64, 3, padding=1), []
    for on in (True, False):
        c = vitrify.compile(m, options={"winograd": on})
        with torch.no_grad():
            c(data(1, 64, 56, 56))
        plans.append(plan_of(c))
    assert "winograd" in plans[0] and "winograd" not in plans[1]


def compile_budget_s(tmp_path):
    with pytest.raises(vitrify.CaptureError, match="compile_budget_s"):
        compiled(lambda x: x.cumsum(0).exp().cumsum(1).reshape(4, 16).t().reshape(8, 8) @ x, compile_budget_s=1e-6)


ROWS = [recompile_limit, error_on_recompile, fusion, disable, target, threads, verify, dump, dump_dir, backend, gemm, memory_budget, packed_weight_mb, winograd, compile_budget_s]
WITHOUT_KERNELS = {verify: "only a graph's text is replayed", compile_budget_s: "the program raises", **dict.fromkeys((gemm, packed_weight_mb, winograd), "layers alone are calls of libraries")}


@pytest.mark.no_kernels("nothing is compiled")
def test_every_option_has_its_row():
    assert {r.__name__ for r in ROWS} == {o[0] for o in vitrify.options()}


@pytest.mark.parametrize("row", ROWS, ids=[r.__name__ for r in ROWS])
def test_every_option_changes_something(row, tmp_path):
    if row in WITHOUT_KERNELS:
        expects.no_kernels(WITHOUT_KERNELS[row])
    if row is recompile_limit:
        expects.eager("recompile_limit is reached")
    row(tmp_path)


REFUSED = [({"fusion": "aggressive"}, "valid are default, off"), ({"backend": "aten"}, "valid are llvm, interp"), ({"keep_slower": True}, "unknown option"),
           ({"disable": ["nonsense"]}, "valid are .*canonicalize.*cse.*dce"), ({"disable": "fuse,conv_layou"}, "valid are .*conv_layout"), ({"dump": ["loop"]}, "valid are graph, loops, llvm"),
           ({"target": "arm"}, "valid are native"), ({"gemm": "blas"}, "valid are auto"), ({"compile_budget_s": 0.0}, "above 0"), ({"compile_budget_s": float("nan")}, "above 0")]


@pytest.mark.no_kernels("nothing is compiled")
@pytest.mark.parametrize("options, what", REFUSED, ids=[str(o) for o, _ in REFUSED])
def test_what_an_option_cannot_be_is_refused(options, what):
    with pytest.raises(vitrify.OptionError, match=what):
        vitrify.compile(lambda x: x, options=options)


@pytest.mark.no_kernels("nothing is compiled")
def test_each_stage_can_be_disabled():
    for name in ("canonicalize", "cse", "dce", "fold_batch_norm", "fuse_conv", "fuse_linear", "small_matmul", "own_attention", "fuse_segments", "hoist_frozen", "conv_layout", "fuse"):
        vitrify.compile(lambda x: x, options={"disable": [name]})


def in_environment(code, **environment):
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True)


GIVEN = "import vitrify; print(vitrify._C.Options().get('verify'))"


@pytest.mark.sweep(4)
@pytest.mark.no_kernels("runs in a process of its own")
@pytest.mark.parametrize("text, on", [("0", False), ("false", False), ("No", False), ("off", False), ("", False), ("1", True), ("TRUE", True), ("yes", True), ("on", True)])
def test_a_flag_of_the_environment(text, on):
    assert in_environment(GIVEN, VITRIFY_VERIFY=text).stdout.strip() == str(on)


@pytest.mark.sweep(2)
@pytest.mark.no_kernels("runs in a process of its own")
@pytest.mark.parametrize("variable, text, valid", [("VITRIFY_VERIFY", "2", "valid are 1, true"), ("VITRIFY_DISABLE", "nonsense", "canonicalize"), ("VITRIFY_BACKEND", "aten", "llvm, interp"), ("VITRIFY_DUMP", "loop", "graph, loops, llvm")])
def test_what_the_environment_cannot_say_is_refused(variable, text, valid):
    r = in_environment(GIVEN, **{variable: text})
    assert r.returncode and "OptionError" in r.stderr and variable in r.stderr and valid in r.stderr
