"""Floats that change from call to call, as a program sees them while it is captured: torch's symbolic floats, whose arithmetic is written down."""
import functools
import gc
import threading
import weakref

import torch

from . import _C

REFUSAL = "reads a tensor's value: aten::item, or a number that changes from call to call"
_here = threading.local()  # .traced: the numbers that only the graph knows, of the capture on this thread


class Number:
    """The node of a torch.SymFloat: a step of a computation."""

    constant = None

    def __init__(self, numbers, step):
        self.numbers, self.step = numbers, step
        if numbers.traced(step):
            _here.traced.append(weakref.ref(self))

    def is_float(self):
        return True

    def is_int(self):
        return False

    is_bool = is_nested_int = is_constant = is_int

    def is_symbolic(self):
        return True

    def has_hint(self):
        return True

    def maybe_as_int(self):
        return None

    def clone(self):
        return Number(self.numbers, self.step)

    def wrap_float(self, v):
        return Number(self.numbers, self.numbers.constant(v))

    def wrap_int(self, v):
        return self.wrap_float(float(v))

    wrap_bool = wrap_int

    def _other(self, o):
        return o if isinstance(o, Number) else self.wrap_float(o.guard_float("", 0) if o.is_float() else float(o.guard_int("", 0)))

    def _refuse(self, *_):
        _C.refuse(REFUSAL)

    guard_float = guard_int = int_ = trunc = floor = ceil = round = str = __str__ = __repr__ = _graph_repr = __hash__ = _refuse

    def sym_float(self):
        return self

    def neg(self):
        return Number(self.numbers, self.numbers.step("neg", self.step, self.step))

    def abs(self):
        return self.sym_max(self.neg()).add(self.wrap_float(0.0))  # adding turns -0.0 into 0.0

    def compare(self, how, a, b):
        if self.numbers.traced(a) or self.numbers.traced(b):
            self._refuse()
        return self.numbers.compare(how, a, b)

    def guard_bool(self, file="", line=0):
        return self.compare("ne", self.step, self.numbers.constant(0.0))

    bool_ = guard_bool


def _binary(op):
    def method(self, other):
        other = self._other(other)
        step = self.numbers.step(op, self.step, other.step)
        if step is None:
            if self.numbers.traced(self.step) or self.numbers.traced(other.step):
                self._refuse()
            _C.refuse("computes with a number that changes from call to call what is no float")
        return Number(self.numbers, step)

    return method


for _name, _op in dict(
    add="add", sub="sub", mul="mul", truediv="div", float_truediv="div", int_truediv="div", pow="pow", float_pow="pow", mod="mod",
    floordiv="floordiv", int_floordiv="floordiv", sym_min="min", sym_max="max",
).items():
    setattr(Number, _name, _binary(_op))


class Answer:
    """The node of a torch.SymBool: a comparison, whose answer every call checks."""

    constant = None

    def __init__(self, value):
        self.value = value

    def is_bool(self):
        return True

    is_constant = is_bool

    def is_int(self):
        return False

    is_float = is_int

    def guard_bool(self, file="", line=0):
        return self.value

    bool_ = guard_bool


def _comparison(how, swap=False):
    def method(self, other):
        pair = self.step, self._other(other).step
        return Answer(self.compare(how, *(pair[::-1] if swap else pair)))

    return method


for _name, _how in dict(eq=("eq",), ne=("ne",), lt=("lt",), le=("le",), gt=("lt", True), ge=("le", True)).items():
    setattr(Number, _name, _comparison(*_how))

_C.set_number_class(lambda numbers, step: torch.SymFloat(Number(numbers, step)))


def is_number(v):
    """Whether it is one of ours."""
    return type(v) is torch.SymFloat and isinstance(v.node, Number)


def extreme(real):
    """Python's max or min, which would compare: among numbers of ours an op of the graph. An int may come out of them as it is: that is compared."""
    name = "sym_" + real.__name__

    @functools.wraps(real)
    def pick(*args, **kwargs):
        if len(args) > 1 and not kwargs and _C.capturing() and any(map(is_number, args)) and all(is_number(a) or type(a) is float for a in args):
            numbers = next(filter(is_number, args)).node.numbers
            first, *rest = (a.node if is_number(a) else Number(numbers, numbers.constant(a)) for a in args)
            return torch.SymFloat(functools.reduce(lambda a, b: getattr(a, name)(b), rest, first))
        return real(*args, **kwargs)

    return pick


def begin():
    _here.traced = []


def check_gone():
    """A traced number that is kept anywhere would be the placeholder it is."""
    alive = lambda: any(r() is not None for r in _here.traced)  # noqa: E731
    if _here.traced and alive():
        gc.collect()  # a frame in a cycle holds what its locals name
        if alive():
            raise _C.CaptureError(REFUSAL)
