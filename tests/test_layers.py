"""The rules of the tree, read from the sources: what may include what, what product code may import, what tracked files may name."""
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_kernels("only sources are read")
ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.M)
BELOW = {"torch", "python"}  # folders of src/ below the line: they may see PyTorch; only python sees Python.h
# Folder -> CMake target where the two differ.
TARGETS = {"codegen/interp": "codegen", "codegen/llvm": "vitrify_llvm"}


def sources(*folders):
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".h", ".cpp", ".def", ".cuh", ".inc"} and path.is_file():
                yield path


def includes(path):
    text = path.read_text()
    for match in INCLUDE.finditer(text):
        yield text.count("\n", 0, match.start(2)) + 1, match.group(1), match.group(2)


def folder_of(path):
    return path.relative_to(ROOT / "src").parts[0]


def found(path, line, what):
    return f"{path.relative_to(ROOT)}:{line}: {what}"


TORCH = re.compile(r"^(torch/(csrc|torch\.h|extension|library|all|headeronly|nn|optim|serialize|utils|script)|ATen/|c10/|caffe2/|pybind11/|aten/)")
PYTHON = re.compile(r"^(Python\.h|pybind11/|internal/pycore|cpython/|pycore_|frameobject\.h|structmember\.h)")


def line_violations():
    bad = []
    for path in sources("src"):
        folder = folder_of(path)
        for line, kind, name in includes(path):
            if folder not in BELOW and TORCH.match(name):
                bad.append(found(path, line, f"torch header {name} above the line"))
            if folder != "python" and PYTHON.match(name):
                bad.append(found(path, line, f"Python header {name} outside src/python"))
    return bad


def test_no_torch_or_python_above_the_line():
    assert line_violations() == []


def test_public_headers_need_no_python():
    bad = [found(p, line, name) for p in sources("include") for line, _, name in includes(p) if PYTHON.match(name)]
    assert bad == []


def test_runtime_and_cache_know_no_compiler():
    bad = [found(path, line, name) for path in sources("src/runtime", "src/cache") for line, _, name in includes(path)
           if name.split("/")[0] in {"codegen", "schedule", "passes", "loop", "pipeline"}]
    assert bad == []


def cmake_arrows():
    """target -> targets it may include, from the vt_library lines; the closure of DEPS."""
    direct = {}
    text = (ROOT / "CMakeLists.txt").read_text()
    for name, rest in re.findall(r"^vt_library\((\w+)([^)]*)\)", text, re.M):
        words = rest.split()
        start = words.index("DEPS") + 1 if "DEPS" in words else len(words)
        deps = []
        for word in words[start:]:
            if word in {"EXTRA", "DIR"}:
                break
            if word.startswith("vt_"):
                deps.append(word[3:])
        direct[name] = deps
    assert {"support", "sym", "ir", "loop", "ops", "passes", "runtime", "codegen", "schedule", "pipeline"} <= set(direct)
    closed = {}

    def close(name):
        if name not in closed:
            closed[name] = {name}.union(*(close(d) for d in direct[name])) if direct[name] else {name}
        return closed[name]

    for name in direct:
        close(name)
    return closed


def test_includes_follow_the_arrows_of_the_build():
    arrows = cmake_arrows()
    arrows["vitrify_llvm"] = arrows["loop"] | {"codegen"}  # links vt_loop; codegen/backend.h is the interface that it implements
    above = {p.name for p in (ROOT / "src").iterdir() if p.is_dir()} - BELOW
    bad = []
    for path in sources("src"):
        parts = path.relative_to(ROOT / "src").parts
        if parts[0] in BELOW:
            if parts[0] == "torch":
                bad += [found(path, line, name) for line, kind, name in includes(path) if kind == '"' and name.startswith("python/")]
            continue
        target = TARGETS.get("/".join(parts[:2]), parts[0])
        for line, kind, name in includes(path):
            used = name.split("/")[0]
            if kind != '"' or "/" not in name or used == "vitrify":
                continue
            if used in BELOW:
                bad.append(found(path, line, f"{target} includes {name}: an arrow that points up"))
            elif used in above and used not in arrows.get(target, {target}):
                bad.append(found(path, line, f"{target} includes {name}: not among what its CMake target links"))
    assert bad == []


PEERS = re.compile(r"torch\.compile\(|torch\._(dynamo|inductor|functorch)|torch\.fx\b|^\s*(import|from)\s+triton|torch\._export\b", re.M)

def test_product_code_uses_no_peer():
    bad = []
    for folder in ("src", "include", "vitrify", "tools"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in {".py", ".h", ".cpp", ".def"}:
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                code = line.split("#" if path.suffix == ".py" else "//")[0]
                if PEERS.search(code):
                    bad.append(found(path, number, line.strip()))
    assert bad == []


def tracked():
    try:
        out = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: nothing is tracked")
    return [ROOT / name for name in out.decode().split("\0") if name and (ROOT / name).is_file()]


def test_no_machine_paths_in_tracked_files():
    path_of_a_machine = re.compile(r"(?<![\w.])/(" + "|".join(["wo" + "rk", "fa" + "rm", "ro" + "ot", "ho" + r"me/\w+"]) + r")/")
    bad = []
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        bad += [found(path, n, line.strip()[:120]) for n, line in enumerate(text.splitlines(), 1) if path_of_a_machine.search(line)]
    assert bad == []


def test_files_stay_readable():
    bad = [f"{p.relative_to(ROOT)}: {n} lines" for p in tracked() if p.suffix in {".py", ".h", ".cpp", ".def"}
           if (n := len(p.read_text().splitlines())) > 800]
    assert bad == []


@pytest.mark.parametrize("folder, text, check", [
    ("ir", "#include <ATen/ATen.h>\n", TORCH),
    ("ir", "#include <torch/csrc/jit.h>\n", TORCH),
    ("torch", "#include <Python.h>\n", PYTHON),
])
def test_the_patterns_see_what_they_forbid(folder, text, check):
    assert check.match(INCLUDE.search(text).group(2))
    assert not check.match("torch/program.h") and not check.match("ir/graph.h")


LOOSE = re.compile(r"\b(rtol|atol)=([0-9.]+(?:e-?[0-9]+)?)(?! \*)")
MOST = {"rtol": 2e-6, "atol": 1e-5}  # of float32: torch.testing.assert_close


def test_looser_bounds_stand_in_one_file():
    loose = [found(path, text.count("\n", 0, m.start()) + 1, m[0]) for path in sorted((ROOT / "tests").rglob("*.py")) for text in [path.read_text()]
             for m in LOOSE.finditer(text) if float(m[2]) > MOST[m[1]]]
    assert not loose, "into tests/bounds.py, with the reason: " + "; ".join(loose)
