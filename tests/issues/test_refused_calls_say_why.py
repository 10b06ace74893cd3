"""A call that a compiled program refuses for what it is given runs eagerly, and says why, once for each reason."""
import warnings

import numpy as np
import pytest
import torch
import vitrify

WHY = "an argument shares memory with one that is written"


def writes(x, y):
    x.add_(1)
    return y * 2


def shifted():
    a = np.arange(20, dtype=np.float32).reshape(5, 4)
    return torch.from_numpy(a[1:]), torch.from_numpy(a[:-1])


def apart():
    return torch.ones(4, 4), torch.ones(4, 4)


@pytest.mark.eager(WHY)
def test_a_refused_call_says_why_once():
    compiled = vitrify.compile(writes)
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        for given in (apart, shifted, shifted, apart):
            ours, eager = given(), given()
            torch.testing.assert_close(compiled(*ours), writes(*eager), rtol=0, atol=0)
            torch.testing.assert_close(ours[0], eager[0], rtol=0, atol=0)
    said = [str(w.message) for w in log if issubclass(w.category, vitrify.VitrifyWarning)]
    assert len(said) == 1 and WHY in said[0], said


@pytest.mark.eager(WHY)
def test_where_warnings_are_errors_nothing_has_happened():
    compiled = vitrify.compile(writes)
    compiled(*apart())
    x, y = shifted()
    with warnings.catch_warnings(), pytest.raises(vitrify.VitrifyWarning, match=WHY):
        warnings.simplefilter("error")
        compiled(x, y)
    assert torch.equal(x, shifted()[0])
