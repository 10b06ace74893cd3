import sys
from pathlib import Path

import pytest
import vitrify

sys.path.insert(0, str(Path(__file__).parent))  # for trainers


@pytest.fixture(autouse=True)
def fresh():
    vitrify.reset()
    yield
    vitrify.reset()
