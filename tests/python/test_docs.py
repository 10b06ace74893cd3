"""What the documents show is what the product does."""
import re
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))


def test_the_option_table_is_the_documented_one():
    import options_table

    assert (ROOT / "docs" / "options.md").read_text() == options_table.table(), "run python tools/options_table.py"


def test_links_in_documents_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").glob("*.md")]:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for target in re.findall(r"\]\(([^)#:]+)\)", prose):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", [p for p in (ROOT / "docs").glob("*.md") if "```python" in p.read_text()], ids=lambda p: p.stem)
def test_python_examples_run(page):
    for example in re.findall(r"^ *```python\n(.*?)```", page.read_text(), re.S | re.M):
        exec(compile(textwrap.dedent(example), str(page), "exec"), {"__name__": "example"})
