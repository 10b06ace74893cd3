"""What is shipped, used from outside the checkout: the wheel in an environment of its own, and find_package(Vitrify) from an install prefix."""
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.network]
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


def test_install_prefix_builds_a_program(tmp_path):
    import torch
    build = ROOT / "build" / "release"
    examples = ROOT / "examples" / "cpp"
    prefix = tmp_path / "prefix"
    run("cmake", "--install", build, "--prefix", prefix)
    assert (prefix / "include/vitrify/compile.h").exists()
    run("cmake", "-S", examples, "-B", tmp_path / "b", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={prefix}", f"-DVITRIFY_TORCH_DIR={Path(torch.__file__).parent}")
    run("cmake", "--build", tmp_path / "b")
    programs = [p for p in (tmp_path / "b").iterdir() if p.is_file() and os.access(p, os.X_OK) and p.suffix == ""]
    assert programs
    for program in programs:
        run(program, env=clean_environment(), cwd=tmp_path)
