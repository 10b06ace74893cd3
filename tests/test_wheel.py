"""What is shipped, used from outside the checkout: the wheel in an environment of its own, and find_package(Vitrify) from an install prefix."""
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.network, pytest.mark.no_kernels("runs in processes of its own")]
PROGRAM = """
import os, torch, vitrify
assert "{outside}" in vitrify.__file__, vitrify.__file__
def f(x, y):
    return torch.nn.functional.gelu(x * y + 1).softmax(-1)
x, y = torch.randn(8, 64), torch.randn(64)
fast = vitrify.compile(f)
with torch.no_grad():
    torch.testing.assert_close(fast(x, y), f(x, y))
    torch.testing.assert_close(fast(x, y), f(x, y))
counters = dict(vitrify.counters)
assert counters["kernels_launched"] > 0 and counters["eager_calls"] == 0, counters
maps = open("/proc/self/maps").read()
assert os.path.dirname(vitrify.__file__) + "/libvitrify_llvm.so" in maps
print("ran", counters["kernels_launched"])
"""


def run(*command, **kwargs):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "-w", folder, cwd=ROOT)
    (path,) = folder.glob("vitrify-*.whl")
    return path


def clean_environment():
    return {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "LD_LIBRARY_PATH"}}


def test_wheel_is_self_contained(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"vitrify/{so}" for so in ("_C.so", "libvitrify.so", "libvitrify_llvm.so")} <= names
    assert "vitrify/include/vitrify/compile.h" in names and "vitrify/cmake/VitrifyConfig.cmake" in names
    assert not [n for n in names if n.startswith(("src/", "tests/", "build/")) or "__pycache__" in n]
    assert wheel.stat().st_size <= 60 * 2**20
    metadata = next(n for n in names if n.endswith("METADATA"))
    assert "Requires-Dist: torch==2.11.0" in zipfile.ZipFile(wheel).read(metadata).decode()


def test_wheel_links_nothing_of_the_machine(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    for name in ("_C.so", "libvitrify.so", "libvitrify_llvm.so"):
        dynamic = run("readelf", "-d", tmp_path / "vitrify" / name)
        needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
        paths = {p for line in dynamic.splitlines() if "PATH)" in line for p in line.split("[")[1].rstrip("]").split(":")}
        assert paths <= {"$ORIGIN", "$ORIGIN/../torch/lib"}, (name, paths)
        allowed = ("libvitrify", "libtorch", "libc10", "libgomp", "libstdc++", "libgcc_s", "libm.", "libc.", "ld-linux", "libpthread", "libdl", "librt", "libz.")
        assert not [n for n in needed if not n.startswith(allowed)], (name, needed)


def test_wheel_runs_in_a_clean_environment(wheel, tmp_path):
    import torch
    env = tmp_path / "env"
    run(sys.executable, "-m", "venv", env)
    python = env / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel)
    (site,) = (env / "lib").glob("python3*/site-packages")
    # torch comes from the environment that runs the tests, linked beside the package as an installation has it
    for item in Path(torch.__file__).parent.parent.iterdir():
        if not (site / item.name).exists() and not item.name.startswith("vitrify"):
            (site / item.name).symlink_to(item)
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.replace("{outside}", str(env)))
    assert "ran" in run(python, script, cwd=tmp_path, env=clean_environment())


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """examples/cpp, copied out of the checkout and built against an install prefix as a user would; no Python where CMake looks."""
    import torch
    folder = tmp_path_factory.mktemp("install")
    run("cmake", "--install", ROOT / "build" / "release", "--prefix", folder / "prefix")
    assert (folder / "prefix/include/vitrify/compile.h").exists()
    shutil.copytree(ROOT / "examples" / "cpp", folder / "source")
    run("cmake", "-S", folder / "source", "-B", folder / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={folder / 'prefix'}",
        f"-DVITRIFY_TORCH_DIR={Path(torch.__file__).parent}", env=clean_environment())
    run("cmake", "--build", folder / "build", env=clean_environment())
    return folder


TRAINED = re.compile(r"^(\w+) +loss [\d.]+ -> [\d.]+ \(eager [\d.]+\)   largest difference \S+   first step [+-]\d+ ms   eager [\d.]+ ms   compiled [\d.]+ ms   [\d.]+x   kernels (\d+)   fallbacks 0$", re.M)
LINE = re.compile(r"^(\w+) +first call [+-]\d+ ms   eager [\d.]+ ms   compiled [\d.]+ ms   [\d.]+x   error \S+ \(eager \S+\)   kernels (\d+)   externs called \d+   fallbacks 0$", re.M)


@pytest.mark.parametrize("name, printed", [("resnet", "resnet18"), ("transformer", "transformer"), ("train_cnn", "CNN"), ("train_gpt", "GPT")])
def test_a_program_built_against_the_prefix(examples, tmp_path, name, printed):
    log = tmp_path / "loaded"
    out = run(examples / "build" / name, env={**clean_environment(), "LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(log)}, cwd=tmp_path)
    line = (TRAINED if name.startswith("train") else LINE).search(out)
    assert line and line[1] == printed and int(line[2]) > 0, out
    # What the dynamic linker loaded, from start to end, dlopen included.
    (trace,) = tmp_path.glob("loaded.*")
    loaded = {Path(m) for m in re.findall(r"calling init: (\S+)", trace.read_text())}
    ours = {p.name: p for p in loaded if p.name.startswith("libvitrify")}
    assert set(ours) == {"libvitrify.so", "libvitrify_llvm.so"}
    assert all(p.resolve().is_relative_to(examples / "prefix") for p in ours.values()), ours
    assert "libtorch_cpu.so" in {p.name for p in loaded}
    assert not [p for p in loaded if "python" in p.name or p.name == "_C.so"], loaded


def test_find_package_without_torch_says_what_to_set(examples, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.25)\nproject(p CXX)\nfind_package(Vitrify REQUIRED)\n")
    done = subprocess.run(["cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={examples / 'prefix'}", f"-DVITRIFY_TORCH_DIR={tmp_path}"],
                          capture_output=True, text=True, env=clean_environment())
    assert done.returncode != 0 and "set VITRIFY_TORCH_DIR to a LibTorch folder" in " ".join(done.stderr.split()), done.stderr
