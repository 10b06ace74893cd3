"""Writes docs/options.md from the option table of the built package (src/support/options.def)."""
import sys
from pathlib import Path

import vitrify


def table() -> str:
    rows = ["# Options", "", "Written by `python tools/options_table.py`. Give them to `vitrify.compile(..., options={...})` or `vitrify::CompileOptions::options`.", "",
            "| option | type | default | in the cache key | meaning |", "|---|---|---|---|---|"]
    for name, kind, default, in_key, meaning in vitrify.options():
        rows.append(f"| `{name}` | {kind} | `{default}` | {'yes' if in_key else 'no'} | {meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    (Path(__file__).resolve().parent.parent / "docs" / "options.md").write_text(table())
    sys.stdout.write(table())
