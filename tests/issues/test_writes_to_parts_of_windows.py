"""A write to a part of a view that overlaps itself: what was written back were all windows, those of before too."""
import beside
import pytest

PROGRAMS = ["v = x.as_strided((4, 4), (2, 1)); v[0] += 1; v[1] += 2; return x", "v = x.as_strided((4, 4), (2, 1)); v[:, 0].mul_(2); return x, v", "v = (x * 1).as_strided((4, 4), (2, 1)); v[2] += 1; return v * 2", "v = x.as_strided((3, 4), (3, 1))[1:]; v[0].zero_(); return x",
            "v = x.as_strided((4, 4), (2, 1)).t(); v[0].add_(1); v[:, 1].add_(1); return x + 1"]


@pytest.mark.eager("overlaps itself")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("text", PROGRAMS)
def test_windows(text, grad):
    beside.check(beside.program(text), beside.steps((10,)), reason="overlaps itself", grad=grad)


@pytest.mark.parametrize("text", ["v = x.as_strided((2, 4), (4, 1)); v[0] += 1; v[1] += 2; return x * 1", "v = x.as_strided((2, 4), (5, 1)); v[:, 0].mul_(2); return x * 1, v * 1"])
def test_windows_apart(text):
    beside.check(beside.program(text), beside.steps((10,)))
