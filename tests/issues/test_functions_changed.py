"""What is compiled of a plain function is the function: its defaults and its code may be others later."""
import torch
import vitrify


def test_defaults_and_code_of_a_compiled_function():
    def f(x, s=1.0):
        return x * 2 + s

    def g(x, *, s=1.0):
        return x * 2 + s

    def h(x):
        return x * 2

    compiled = [vitrify.compile(k) for k in (f, g, h)]
    x = torch.ones(3)

    def check():
        for ours, eager in zip(compiled, (f, g, h), strict=True):
            for _ in range(2):
                assert torch.equal(ours(x), eager(x))
    check()
    f.__defaults__, g.__kwdefaults__, h.__code__ = (5.0,), {"s": 5.0}, (lambda x: x * 7).__code__
    check()
    f.__defaults__ = (1.0,)
    check()
