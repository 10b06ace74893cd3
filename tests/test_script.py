"""What ./x and tests/report.py count: nothing that did not run, or did not end, passes."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.no_kernels("the script is tested: nothing is compiled")


def script(folder, commands, **stubs):
    """Functions of ./x with stubs for what they run: the last line that `commands` print."""
    for name, (says, code) in stubs.items():
        path = folder / {"python": ".venv/bin/python", "ctest": "bin/ctest"}[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\ncat <<'E'\n{says}\nE\nexit {code}\n")
        path.chmod(0o755)
    functions = (ROOT / "x").read_text().partition("# ---- commands ---")[0].replace('root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)', "root=$PWD")
    (folder / "build" / "release").mkdir(parents=True, exist_ok=True)
    env = os.environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    run = subprocess.run(["bash", "-c", f'{functions}\nselect_torch; failures=$PWD/failures.txt; : > "$failures"\n{commands}\necho "$passed $failed"'], cwd=folder, env=env, capture_output=True, text=True)
    return run.stdout.splitlines()[-1], (folder / "failures.txt").read_text()


COUNTS = {
    "run_ctest build/release": ("ctest", [
        ("100% tests passed, 0 tests failed out of 13", 0, "13 0"),
        ("85% tests passed, 2 tests failed out of 13\n 3 - door (Failed)", 8, "11 2"),
        ("No tests were found!!!", 0, "0 1"),
        ("100% tests passed, 0 tests failed out of 13\nErrors while running CTest", 8, "12 1"),
        ("Test project", 137, "0 1"),
    ]),
    "run_pytest -q": ("python", [
        ("10 passed, 2 skipped in 1s", 0, "10 0"),
        ("FAILED tests/a.py::b - no\n1 failed, 10 passed in 1s", 1, "10 1"),
        ("3000 skipped in 2s", 0, "0 1"),
        ("1234 deselected in 2s", 5, "0 1"),
        ("10 passed", 139, "10 1"),
    ]),
    "run_fuzz 200 --report r.md": ("python", [
        ("200 programs from seed 0: 200 as eager: passed", 0, "200 0"),
        ("seed 7: out[0] differs\n200 programs from seed 0: 1 failed: FAILED", 1, "199 1"),
        ("200 programs from seed 0: FAILED: more than 1% inconclusive", 1, "199 1"),
        ("RuntimeError: a worker does not start", 1, "0 1"),
    ]),
}


@pytest.mark.parametrize("commands, stub, says, code, counts", [(commands, stub, *case) for commands, (stub, cases) in COUNTS.items() for case in cases])
def test_what_is_counted(tmp_path, commands, stub, says, code, counts):
    got, names = script(tmp_path, commands, **{stub: (says, code)})
    assert got == counts and bool(names) == (not counts.endswith(" 0"))


@pytest.mark.parametrize("says, counts", [("", "14 0"), ("src/a.cpp", "13 1")])
def test_format_counts(tmp_path, says, counts):
    commands = f'python_tests() {{ :; }}; format() {{ printf "{says}"; }}; quick_tests'
    assert script(tmp_path, commands, ctest=("100% tests passed, 0 tests failed out of 13", 0))[0] == counts


def test_quick_tests_select_something(tmp_path):
    """Each selection of ./x test has tests: one that has none fails."""
    for selection in ("not serial and not slow", "serial"):
        says = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--collect-only", "-m", selection, "tests/models", "tests/test_wheel.py"], cwd=ROOT, capture_output=True, text=True)
        assert says.returncode == 0 and "::" in says.stdout, says.stdout + says.stderr
    commands = "cpp_tests() { passed=1; }; format() { :; }; quick_tests"
    assert script(tmp_path, commands, python=("10 passed in 1s", 0))[0] == "12 0"


def test_a_missing_formatter_is_not_clean(tmp_path):
    subprocess.run("git init -q . && mkdir src && echo 'int  x;' > src/a.cpp", shell=True, cwd=tmp_path, check=True)
    assert script(tmp_path, 'passed="$(format --check)"')[0].startswith(".venv/bin/clang-format is missing")


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "tests").mkdir()
    for name in ("report.py", "provenance.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    (tmp_path / "a").write_text("1")
    subprocess.run("git init -q . && git config user.email a@b && git config user.name n && git add -A && git commit -qm one", shell=True, cwd=tmp_path, check=True)
    return tmp_path


def report(tree, *args):
    without = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}  # the path of who runs the tests would find what the tree lacks
    return subprocess.run([sys.executable, str(tree / "tests" / "report.py"), *map(str, args)], cwd=tree, env={**without, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}, capture_output=True, text=True)


def test_a_report(tree):
    parts = ("quick", "slow", "fuzz", "asan", "tsan", "lane", "wheel", "cpp", "docs")

    def done(part, passed=1):
        report(tree, part, "--begin")
        report(tree, part, "--passed", passed, "--failed", 0, "--seconds", 1)
    for part in parts[1:]:
        done(part)
    assert "quick: not run" in report(tree, "--check").stdout
    report(tree, "quick", "--begin")
    assert "quick: 1 failed" in report(tree, "--check").stdout  # it died
    done("quick", passed=0)
    assert "quick: 1 failed" in report(tree, "--check").stdout
    done("quick")
    assert report(tree, "--check").returncode == 0
    subprocess.run("git add -A && git commit -qm report", shell=True, cwd=tree, check=True)
    assert report(tree, "--check").returncode == 0  # the commit of the report itself tests nothing else
    report(tree, "quick", "--begin")
    (tree / "a").write_text("2")
    report(tree, "quick", "--passed", 1, "--failed", 0, "--seconds", 1)
    assert "quick: of commit" in report(tree, "--check").stdout and ".." in report(tree, "--check").stdout  # it changed meanwhile
