"""Sizes and floats that stand for many, in arithmetic, comparisons and errors: as Python's numbers, also where the program catches what torch's symbols raise instead."""
import math

import expects
import pytest
import torch

import vitrify

EXPRESSIONS = [
    '(n/2-5)**2', '(n-9)**-1', 'n**-1', '(n-6)**2.0', '(-0.5)**n', '(-2)**(n/2)', 'round(n/2)', 'round(n/3,2)', '(n/2).__round__(0)',
    '(n/2).__abs__()', 'n<2**64', 'n==10**30', 'min(n,10**30)', 'max(n,10**30)', 'n in (10**30,5)', 'n+2**63', 'n*10**19', '10**30//n', 'n+1j',
    'n*1j', '1j*n', '100//(n-6)', 'n%(n-6)', 'pow(n,-1,7)', 'pow(n,2,7)', "n<'a'", "n+'a'", 'n+None', 'n==None', "n!='a'", 'n*[1]', '[1]*n', "n*'ab'",
    'n*(1,2)', 'n+(n>2)', '(n>2)+n', 'n-True', 'True*n', 'n//True', 'n%True', 'n**True', '2**(n>2)', 'n+(n%2==1)', 'round(n,-1)', 'round(n)',
    'round(n,None)', 'round(n,1)', 'divmod(n,0.7)', 'divmod(n,3)', 'divmod(100,n)', '(-n)**0.5', "float('nan')**n", "float('inf')%n", 'n//0', 'n%0',
    'n/0', 'n//10**20', 'abs(n-9)', 'abs(-n/7)', 'n**n', 'n**0.5', 'n**2', '2**n', 'n*n', 'n-n', '-n', '+n', '~n', 'n<<2', 'n>>1', 'n&6', 'n|1',
    'n^3', 'float(n)', 'int(n/2)', 'complex(n)', 'math.sqrt(n)', 'math.floor(n/3)', 'math.ceil(n/3)', "f'{n}'", "f'{n/2:.3f}'", 'n==n+0.0', 'n>=2.5',
    'n<True', 'bool(n-3)', 'n.__add__(2)', 'n.__radd__(2)', 'n.bit_length()', '(n/4).is_integer()', '(n/4).as_integer_ratio()', 'math.trunc(n/3)',
    'math.ldexp(1.,3)', 'n.real', 'n.numerator', 'divmod(n,0)', 'n%2.5', '2.5%n', 'n//2.5', '-n//2.5', '-n%2.5', 'n/3', '3/n', 'sum([n,n])',
    'hash(n)', 'isinstance(n+(n>2),int)', 'type(n)==int or True', 'n+False', 'min(n,5)', 'max(n,5)', 'sorted([n,5,3])',
]
PROGRAM = """
def f(x):
    n = {number}
    try:
        s = {expression}
    except ZeroDivisionError as e:
        return x * 100, ("zero", str(e))
    except Exception as e:
        return x * 50, (type(e).__name__, str(e))
    if isinstance(s, (int, float)) and s == s and abs(s) < 1e6:
        return torch.full((2,), s) * x[0], torch.arange(3) * s, repr(s)
    return x * 2, repr(s)
"""
NUMBERS = {"a size": "x.shape[0]", "a size from content": "x[x > 0].shape[0]", "a float": "x.shape[0] / 2"}


def results(out, number):
    if number == "a float" and isinstance(out[-1], tuple):
        out = (out[0], out[-1][0])  # texts name the class where there is no such method
    return [(t.dtype, t.tolist()) if isinstance(t, torch.Tensor) else t for t in out]


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_as_eager(expression, number):
    names = {"torch": torch, "math": math}
    exec(PROGRAM.format(number=NUMBERS[number], expression=expression), names)
    f = names["f"]
    if number == "a size from content":
        expects.eager("a size that follows from content is not what the plan is for", "a division by zero", some=True)
    for dynamic in (None, True):
        compiled = vitrify.compile(f, dynamic=dynamic, options={"recompile_limit": 64})
        for n in (4, 6, 12, 3, 5):
            assert repr(results(compiled(torch.ones(n)), number)) == repr(results(f(torch.ones(n)), number))


def test_symbols_of_others_are_as_without_us():
    """torch.export makes its own, which know nothing of what ours do."""
    class M(torch.nn.Module):
        def forward(self, x):
            n = x.shape[0]
            return x / math.sqrt(x.shape[-1]) * float(n) * math.log(n) + (n > 2)

    auto = torch.export.Dim.AUTO
    program = torch.export.export(M(), (torch.ones(5, 4),), dynamic_shapes={"x": {0: auto, 1: auto}}, strict=False)
    x = torch.ones(5, 4)
    torch.testing.assert_close(program.module()(x), M()(x))
    torch.testing.assert_close(vitrify.compile(M())(x), M()(x))
