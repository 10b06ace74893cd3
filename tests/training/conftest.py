import pytest
import vitrify


@pytest.fixture(autouse=True)
def fresh():
    vitrify.reset()
    yield
    vitrify.reset()
