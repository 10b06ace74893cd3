"""What a report says of where it comes from."""
import os
import platform
import subprocess
from pathlib import Path


def commit_of(args):
    if args.commit or os.environ.get("VITRIFY_COMMIT"):
        return args.commit or os.environ["VITRIFY_COMMIT"]
    try:
        return subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def processor():
    try:
        names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"
