import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))
from conftest import *  # noqa: E402,F401,F403
