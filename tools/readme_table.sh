#!/usr/bin/env bash
# Runs ./x demo and puts what it printed into README.md between the demo markers.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp)
COLUMNS=140 ./x demo "$@" | tee "$log"
python3 - "$log" <<'P'
import re, sys
lines = open(sys.argv[1]).read().splitlines()
first = next(i for i, l in enumerate(lines) if ", torch " in l and " threads" in l)
text = "\n".join(l.rstrip() for l in lines[first:]).strip()
page = open("README.md").read()
page = re.sub(r"(<!-- demo: begin -->).*(<!-- demo: end -->)", lambda m: f"{m[1]}\n```\n{text}\n```\n{m[2]}", page, flags=re.S)
open("README.md", "w").write(page)
P
