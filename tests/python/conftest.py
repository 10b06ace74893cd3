import sys
import warnings
from pathlib import Path

import pytest
import torch
import vitrify

sys.path.insert(0, str(Path(__file__).parent))  # for helpers


@pytest.fixture(autouse=True)
def fresh():
    vitrify.reset()
    torch.manual_seed(0)
    yield
    vitrify.reset()


class Delta:
    """Counters since it was made."""

    def __init__(self):
        self.before = dict(vitrify.counters)

    def __getattr__(self, name):
        return vitrify.counters[name] - self.before[name]


@pytest.fixture
def delta():
    return Delta()


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", vitrify.VitrifyWarning)
        yield
