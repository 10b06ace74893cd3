"""Windows and frequencies have rules of their own for what they give: Meta's kernels fill an arange, in Python code."""
import pytest
import torch

import expects
import vitrify

OPS = {"hann": lambda n, **k: torch.hann_window(n, **k), "hann, symmetric": lambda n, **k: torch.hann_window(n, False, **k), "hamming": lambda n, **k: torch.hamming_window(n, **k),
       "hamming, alpha": lambda n, **k: torch.hamming_window(n, True, .5, **k), "hamming, beta": lambda n, **k: torch.hamming_window(n, False, .5, .4, **k),
       "blackman": lambda n, **k: torch.blackman_window(n, **k), "bartlett": lambda n, **k: torch.bartlett_window(n, False, **k), "fftfreq": lambda n, **k: torch.fft.fftfreq(n, .25, **k),
       "rfftfreq": lambda n, **k: torch.fft.rfftfreq(n, **k)}


def outcome(f, *args):
    try:
        return f(*args)
    except Exception as e:
        return type(e), str(e)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_samples(op, dtype, dynamic):
    k = {} if dtype is None else {"dtype": dtype}
    f = lambda x: OPS[op](x.shape[0], **k) * 2 + x.sum()
    compiled = vitrify.compile(f, dynamic=dynamic)
    for n in (4, 7, 1, 2, 9):
        x = torch.ones(n, 2)
        want, got = outcome(f, x), outcome(compiled, x)
        if isinstance(want, tuple):
            expects.no_kernels("eager raises for whole numbers")
            expects.eager("window", "Long", "result type", some=True)
            assert got == want
        else:
            torch.testing.assert_close(got, want, check_stride=True)
