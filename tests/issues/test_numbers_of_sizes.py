"""What a program computes from sizes: integers and floats as Python's, also where divisors are negative, and its exceptions."""
import expects
import pytest
import torch
import vitrify


def same(f, *shapes):
    compiled = vitrify.compile(f, dynamic=True)
    for shape in shapes:
        x = torch.ones(shape)
        try:
            want = f(x)
        except Exception as e:
            with pytest.raises(type(e)) as got:
                compiled(x)
            assert str(got.value) == str(e)
        else:
            got = compiled(x)
            assert got.shape == want.shape
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(got.signbit(), want.signbit())


SHAPES = (3, 7), (6, 2), (5, 13), (2, 9), (9, 3)


@pytest.mark.parametrize("f", [
    lambda x: x.new_ones(-((2 * x.shape[0] + 1) // -(2 * x.shape[1]))) * 2,
    lambda x: x * ((2 * x.shape[0] + 1) // (2 * x.shape[1] - 20)),
    lambda x: x[:, :(2 * x.shape[0] + 1) % (2 * x.shape[1] - 20) + 40] * 1,
    lambda x: x * ((2 * x.shape[0] + 1) % (2 * x.shape[1] - 20)),
    lambda x: x * ((4 * x.shape[0] * x.shape[1] + 3) // (-4 * x.shape[0])),
    lambda x: x * ((4 * x.shape[0] * x.shape[1] + 3) % (-4 * x.shape[0])),
    lambda x: x * ((6 * x.shape[0] - 4) // (6 - 3 * x.shape[1])),
    lambda x: x * ((x.shape[0] * x.shape[1] + x.shape[0] - 1) // (x.shape[0] * (8 - x.shape[1]) - x.shape[0] * 4 * x.shape[1])),
], ids=range(8))
def test_negative_divisors(f):
    same(f, *SHAPES)
