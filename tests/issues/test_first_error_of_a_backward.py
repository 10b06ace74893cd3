"""A backward that must raise for several reasons raises as eager does, whose nodes run in one order: also for those between that other nodes of the call stand for,
and where what is read here is not what eager's node has saved."""
import itertools

import pytest
import torch
import vitrify

NO_DERIVATIVE = torch.floor_divide
PROGRAMS = {
    "behind it": lambda x, y: (lambda a: (a, a * a, x * 2, a * a * y * 3))(NO_DERIVATIVE(x, y)), "in front of it": lambda x, y: (lambda a: (a, NO_DERIVATIVE(a, y), a * y))(x * 2),
    "a result between": lambda x, y: (lambda a: (lambda b: (a, b, x * 2, torch.minimum(b, b)))(torch.logaddexp(a, y)))(NO_DERIVATIVE(x, y)),
    "beside it": lambda x, y: (lambda a: (lambda b: (a, NO_DERIVATIVE(b, b + 1), torch.outer(b, b), torch.atan2(b, y)))((a.abs() + 1).sqrt()))(x * 1.5),
    "outer": lambda x, y: (lambda a: (lambda b: (lambda c: (a, c, torch.outer(c, b), torch.atan2(b, y)))(NO_DERIVATIVE(b, b + 1)))((a.abs() + 1).sqrt()))(x * 1.5),
}


@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name, written):
    fn = PROGRAMS[name]
    compiled = vitrify.compile(fn, fullgraph=True)

    def outcome(f, roots):
        x, y = torch.tensor([0.3, 2.0]).requires_grad_(), torch.tensor([0.7, 0.1]).requires_grad_()
        out = f(x, y)
        with torch.no_grad():
            out[written].add_(1)
        try:
            sum(out[r].sum() for r in roots).backward()
        except RuntimeError as e:
            return str(e).partition(" [")[0][:90]
        return x.grad, y.grad
    n, raised = len(fn(torch.ones(2), torch.ones(2))), 0
    for roots in (r for k in range(1, n + 1) for r in itertools.permutations(range(n), k)):
        theirs, ours = outcome(fn, roots), outcome(compiled, roots)
        raised += isinstance(theirs, str)
        if isinstance(theirs, str):
            assert ours == theirs, roots
        else:
            torch.testing.assert_close(ours, theirs)
    assert raised
