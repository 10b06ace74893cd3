"""x.new_tensor([...]) and x.new(...) beside a placeholder raised what eager does not: such programs ran eagerly, and those that catch the error went another way."""
import expects
import pytest
import torch

import vitrify

PROGRAMS = {
    "a list": lambda x: x.new_tensor([1, 2.5]) + x,
    "another dtype": lambda x: x.new_tensor([1, 2], dtype=torch.int64) * x,
    "a number": lambda x: x.new_tensor(3) * x,
    "of booleans": lambda x: (x > 0).new_tensor([1, 0]) * x,
    "of a size": lambda x: x.new_tensor([x.shape[0] * 1.0, 2]) + x,
    "with a gradient": lambda x: x.new_tensor([1.0, 2.0], requires_grad=True) * x,
    "nested": lambda x: x.new_tensor([[1, 2], [3, 4]]).sum(0) * x,
    "of a tensor": lambda x: x.new_tensor(x) * 2,
    "of halves": lambda x: x.half().new_tensor([1e-9, 3]) * x,
    "large": lambda x: x.new_tensor([2**40]) * x,
    "not a number": lambda x: x.new_tensor(["a"]) * x,
    "nothing": lambda x: x.new_tensor() * x,
    "no such keyword": lambda x: x.new_tensor([1.0], names=None) * x,
    "of a negative view": lambda x: torch.complex(x, x).conj().imag.new_tensor([1.0]) * x,
    "of a conjugate view": lambda x: torch.complex(x, x).conj().new_tensor([1.0]) * x,
    "new, of a negative view": lambda x: torch.complex(x, x).conj().imag.new(2).fill_(1) * x,
    "new, sizes": lambda x: x.new(2).zero_() + x,
    "new, two sizes": lambda x: x.new(2, 2).fill_(1).sum(0) * x,
    "new, a list": lambda x: x.new([1, 2]) * x,
    "new, a shape": lambda x: x.new(x.size()).fill_(2) * x,
    "new, a size of its own": lambda x: x.new(x.shape[0]).fill_(2) * x,
    "new, a tensor": lambda x: x.new(x) * 2,
}


def outcome(f, x):
    try:
        return f(x)
    except Exception as e:
        return type(e), str(e)


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name, caught, dynamic):
    f = PROGRAMS[name]
    if name == "new, a tensor":
        expects.eager("it calls Tensor.new() with something else than sizes or numbers")
    elif name in ("not a number", "nothing", "no such keyword", "of a negative view", "of a conjugate view", "new, of a negative view") and not caught:
        expects.no_kernels("the program raises")

    def catches(x):
        try:
            return f(x)
        except Exception:
            return x * 0
    x, program = torch.tensor([0.5, -1.5]), catches if caught else f
    compiled, want = vitrify.compile(program, dynamic=dynamic), outcome(program, x)
    for _ in range(2):
        got = outcome(compiled, x)
        assert got == want if isinstance(want, tuple) else torch.equal(got, want) and got.dtype == want.dtype and got.requires_grad == want.requires_grad
