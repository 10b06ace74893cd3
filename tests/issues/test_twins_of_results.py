"""What is computed twice is two tensors: users change the one that they were given, and a derivative reads the other."""
from itertools import product

import bounds
import pytest
import torch
import torch.nn.functional as F
import vitrify
from torch.autograd import grad

OPS = {
    "exp": lambda x: x.exp(), "sigmoid": lambda x: x.sigmoid(), "relu": lambda x: (x - 0.5).relu(), "softmax": lambda x: x.softmax(1),
    "norm": lambda x: F.layer_norm(x, (4,)), "product": lambda x: x @ x.t() @ x, "scan": lambda x: x.cumprod(1), "sine": lambda x: x.sin(),
}
PROGRAMS = {
    "result": lambda o: lambda x, w: (o(x), o(x) * w), "results": lambda o: lambda x, w: (o(x), o(x), o(x) * w),
    "views": lambda o: lambda x, w: (o(x)[1:], o(x).t(), o(x) * w), "detached": lambda o: lambda x, w: (o(x).detach(), o(x) * w),
    "in place": lambda o: lambda x, w: (o(x).mul_(2), o(x) * w), "beside": lambda o: lambda x, w: (o(x) * w, (o(x) * w * x).exp()),
    "shared": lambda o: lambda x, w: (lambda h: (h, h.t(), o(x) * w))(o(x)),
}


def written(t, how):
    if how == "data":
        t.data.mul_(1.3)
    else:
        with torch.no_grad():
            t.mul_(1.3)


def run(f, write, what, twice):
    torch.manual_seed(0)
    x, w = (torch.rand(3, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    results = f(x, w)
    written(x if what == "argument" else results[0], write)
    said = []
    for inputs in ([w], [x, w]):
        try:
            first = grad(results[-1].sum(), inputs, create_graph=twice, retain_graph=True)
            said += first
            if twice:
                said += [g for g in grad(sum(g.square().sum() for g in first), [x, w], allow_unused=True, retain_graph=True) if g is not None]
        except RuntimeError as e:
            said.append(str(e).partition(":")[0])
    return said


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_result_is_written(program, op):
    f = PROGRAMS[program](OPS[op])
    compiled = vitrify.compile(f)
    for write, what, twice in product(("data", "in place"), ("result", "argument"), (False, True)):
        wanted, given = run(f, write, what, twice), run(compiled, write, what, twice)
        assert [type(a) for a in given] == [type(a) for a in wanted], (write, what, twice, given, wanted)
        for a, b in zip(given, wanted):
            if isinstance(b, torch.Tensor):
                torch.testing.assert_close(a, b)
            else:
                assert a == b


@pytest.mark.parametrize("write", ["data", "in place"])
def test_a_gradient_is_written(write):
    """The gradient that users were given is not what the derivative of another one reads."""
    def f(b, w, d, u):
        return (b.sin() * u + (w + d.sin()) * u).sum()

    seen = []
    for g in (f, vitrify.compile(f)):
        b, w, d, u = (torch.full((3,), v, dtype=torch.float64, requires_grad=True) for v in (0.3, 0.5, 0.7, 0.9))
        gb, gw, gd = grad(g(b, w, d, u), [b, w, d], create_graph=True)
        written(gw, write)
        seen.append(grad(gb.sum(), b, create_graph=True)[0])
        written(gd, write)
        seen[-1] = [seen[-1], grad(seen[-1].sum(), b)[0]]
    torch.testing.assert_close(seen[1], seen[0])
