"""What the documents show is what the product does."""
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))


@pytest.mark.no_kernels("nothing is compiled")
def test_the_option_table_is_the_documented_one():
    import options_table

    assert (ROOT / "docs" / "options.md").read_text() == options_table.table(), "run python tools/options_table.py"


@pytest.mark.no_kernels("nothing is compiled")
def test_links_in_documents_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")]:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return [textwrap.dedent(code) for code in re.findall(rf"^ *```{language}\n(.*?)```", page.read_text(), re.S | re.M)]


@pytest.mark.eager("it writes Python state, as caches do at first", some=True)
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.stem)
def test_python_examples_run(page):
    import torch
    given = {"model": torch.nn.Linear(8, 8).requires_grad_(False), "x": torch.randn(4, 8)} if page.stem == "README" else {}  # a reader's own
    for example in blocks(page, "python"):
        exec(compile(example, str(page), "exec"), {"__name__": "example", **given})


# What a C++ example takes as a reader's own.
GIVEN = """
torch::manual_seed(0);
torch::nn::Sequential net(torch::nn::Linear(8, 8));
torch::Tensor x = torch::randn({4, 8});
std::vector<std::pair<torch::Tensor, torch::Tensor>> batches{{x, torch::randint(8, {4})}};
"""
INSIDE = {"adding-an-op"}  # pages for those who change the engine: their C++ is a piece of a file of src/


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.no_kernels("runs in a process of its own")
def test_cpp_examples_run(tmp_path):
    """Each in a function of its own, in one program against an install prefix; each must launch kernels, and nothing runs eagerly."""
    import torch
    includes, bodies = {"#include <torch/torch.h>", "#include <vitrify/compile.h>"}, []
    for page in PAGES:
        for example in blocks(page, "cpp") if page.stem not in INSIDE else []:
            lines = example.splitlines()
            includes |= {line.partition("//")[0].strip() for line in lines if line.startswith("#include")}
            bodies.append((page.stem, "\n".join(line for line in lines if not line.startswith("#include"))))
    assert {"README", "training"} <= {name for name, _ in bodies}
    program = "\n".join(sorted(includes)) + "\n#include <cstdio>\nint main() {\n"
    for name, body in bodies:
        program += f"""{{ vitrify::reset_counters();
{{ {GIVEN} {body} }}
auto c = vitrify::counters_map();
std::printf("{name} %d %d\\n", int(c["kernels_launched"]), int(c["eager_calls"] + c["fallbacks"])); }}
"""
    (tmp_path / "main.cpp").write_text(program + "}\n")
    (tmp_path / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.25)\nproject(p CXX)\nfind_package(Vitrify REQUIRED)\nadd_executable(p main.cpp)\n"
                                             "target_link_libraries(p PRIVATE vitrify::vitrify)\n")
    for command in (["cmake", "--install", ROOT / "build" / "release", "--prefix", tmp_path / "prefix"],
                    ["cmake", "-S", tmp_path, "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}", f"-DVITRIFY_TORCH_DIR={Path(torch.__file__).parent}"],
                    ["cmake", "--build", tmp_path / "b"], [tmp_path / "b" / "p"]):
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ran = re.findall(r"^(\w+) (\d+) (\d+)$", done.stdout, re.M)
    assert [name for name, *_ in ran] == [name for name, _ in bodies]
    assert all(int(kernels) > 0 and int(eager) == 0 for _, kernels, eager in ran), ran
