"""Tests cannot pass where the engine fails or does nothing: tests/conftest.py and tests/expects.py, run on tests that should fail."""
import os
import subprocess
import sys
from pathlib import Path

import expects
import pytest
import torch
import vitrify
from vitrify import _C

TESTS = Path(__file__).resolve().parents[1]
CASES = '''
import expects, pytest, torch, vitrify, warnings
from vitrify import _C

f = lambda x: x.sin() + 1
def call(fn=f):
    with torch.no_grad(), warnings.catch_warnings(record=True):  # what hides warnings hides nothing
        warnings.simplefilter("always")
        vitrify.compile(fn)(torch.ones(3))

def test_native():
    call()

def test_an_internal_error():
    _C.plant_fault("schedule")
    call()
    call()

def test_an_eager_call():
    call()
    call(lambda x: x + x.sum().item() * float(x[0]))

@pytest.mark.eager("reads a tensor's value")
def test_an_eager_call_announced():
    call(lambda x: x + float(x[0]))

@pytest.mark.eager("reads a tensor's value")
def test_announced_in_vain():
    call()

def test_counters_that_are_reset():
    _C.plant_fault("schedule")
    call()
    vitrify.reset()
    call()

def test_nothing():
    pass

def test_views_only():
    call(lambda x: x.view(-1))

@pytest.mark.compiled("only a view is made")
def test_views_only_announced():
    call(lambda x: x.view(-1))

@pytest.mark.no_kernels("nothing is called")
def test_nothing_announced():
    pass

@pytest.mark.no_kernels("it says so, and is wrong")
def test_kernels_where_none_are_announced():
    call()
'''
FAIL = {"test_an_internal_error", "test_an_eager_call", "test_announced_in_vain", "test_counters_that_are_reset", "test_nothing", "test_views_only", "test_kernels_where_none_are_announced"}
NOOP = "import vitrify\nvitrify.compile = lambda target, **settings: target\n"


def failed(folder, plugin=""):
    (folder / "test_cases.py").write_text(CASES)
    (folder / "pytest.ini").write_text((TESTS.parent / "pytest.ini").read_text().replace("testpaths = tests\n", ""))
    (folder / "plugin.py").write_text(plugin)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(vitrify.__file__).parents[1]), str(TESTS), str(folder)])}
    env.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "plugin", "-p", "no:cacheprovider", str(folder / "test_cases.py")],
                          capture_output=True, text=True, cwd=folder, env=env)
    assert "11 " in done.stdout or "failed" in done.stdout, done.stdout + done.stderr
    return {line.split("::")[1].split(" ")[0] for line in done.stdout.splitlines() if line.startswith("FAILED")}


@pytest.mark.no_kernels("the cases run in a process of their own")
def test_what_nobody_announced_fails(tmp_path):
    assert failed(tmp_path) == FAIL


@pytest.mark.no_kernels("the cases run in a process of their own")
def test_a_compiler_that_does_nothing_fails(tmp_path):
    """Only what names why nothing runs passes."""
    everything = {line.split("(")[0].removeprefix("def ") for line in CASES.splitlines() if line.startswith("def test_")}
    assert failed(tmp_path, NOOP) == everything - {"test_nothing_announced", "test_kernels_where_none_are_announced"}


def test_a_reason_is_a_text():
    for bad in ("", "no", None):
        with pytest.raises(ValueError, match="at least"):
            expects.eager(bad)
    watch = expects.Watch()
    with torch.no_grad():
        vitrify.compile(lambda x: x * 2)(torch.ones(2))
    assert watch.wrong(expects.Expected()) == []
    _C.note_eager("a reason that a test makes up")
    assert len(watch.wrong(expects.Expected())) == 1
    expects.eager("that a test makes up")


@pytest.mark.no_kernels("the cases are collected, in a process of their own")
def test_of_a_sweep_a_part_is_quick(tmp_path):
    (tmp_path / "test_sweep.py").write_text('import pytest\n@pytest.mark.sweep(3)\n@pytest.mark.parametrize("a", range(4))\n@pytest.mark.parametrize("b", range(3))\ndef test(a, b): pass\n')
    (tmp_path / "pytest.ini").write_text((TESTS.parent / "pytest.ini").read_text().replace("testpaths = tests\n", ""))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(vitrify.__file__).parents[1]), str(TESTS)])}

    def collected(mark):
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "--collect-only", "-m", mark, "test_sweep.py"], capture_output=True, text=True, cwd=tmp_path, env=env)
        return [tuple(map(int, line.split("[")[1].rstrip("]").split("-"))) for line in done.stdout.splitlines() if "::test[" in line]
    quick, slow = collected("not slow"), collected("slow")
    assert len(quick) == 4 and len(slow) == 8 and len({*quick, *slow}) == 12
    assert all(len({c[i] for c in quick}) >= 3 for i in (0, 1))  # no row or column is all there is
