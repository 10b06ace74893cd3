import sys
from pathlib import Path

import pytest
import torch
import vitrify

sys.path.insert(0, str(Path(__file__).parent))  # for gradients, trainers


@pytest.fixture(autouse=True)
def fresh():
    vitrify.reset()
    torch.manual_seed(0)
    with torch.enable_grad():
        yield
    vitrify.reset()


@pytest.fixture
def compiles():
    """The calls of the test are compiled and give no warning."""
    import warnings
    before = dict(vitrify.counters)
    with warnings.catch_warnings():
        warnings.simplefilter("error", vitrify.VitrifyWarning)
        yield
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    assert did["compiled_calls"] > 0 and did["eager_calls"] == 0 and did["fallbacks"] == 0, did
