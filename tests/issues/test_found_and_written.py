"""What a program finds and writes in place autograd meets as itself: a node that saved it was not watched, and a later derivative met the history of the call in it, and waited for itself."""
import expects
import pytest
import torch
import vitrify

BODIES = {"inside": lambda h, x, op: (op(h), h * x)[1], "after": lambda h, x, op: (lambda y: (op(h), y)[1])(h * x), "only": lambda h, x, op: (op(h), x * 2)[1], "plus": lambda h, x, op: (op(h), h + x)[1]}
SINCE = {"nothing": None, "unseen": lambda h: torch.no_grad()(h.mul_)(2), "mul_": lambda h: h.mul_(2), "add_": lambda h: h.add_(2), "again": None}


@pytest.mark.parametrize("since", SINCE)
@pytest.mark.parametrize("op", ["exp_", "sigmoid_", "tanh_"])
@pytest.mark.parametrize("body", BODIES)
def test_as_eager(body, op, since):
    expects.eager("in a way that gradients must follow, and they read it")
    found = {}
    f = lambda x: BODIES[body](found["h"], x, lambda h: getattr(h, op)())  # noqa: E731
    compiled = vitrify.compile(f)
    for _ in range(2):
        results = []
        for g in (compiled, f):
            w, x = torch.linspace(0.1, 1, 16).view(4, 4).requires_grad_(), torch.linspace(1, 2, 16).view(4, 4).requires_grad_()
            found["h"] = w * 2
            y = g(x)
            if SINCE[since]:
                SINCE[since](found["h"])
            loss = y.sum() + found["h"].sum()
            try:
                made = torch.autograd.grad(loss, (w, x), create_graph=since == "again")
                if since == "again":
                    made += torch.autograd.grad(sum(t.square().sum() for t in made), w)
                results.append([found["h"]._version, *(t.detach() for t in made)])
            except RuntimeError as e:
                results.append(str(e))
        assert results[0] == results[1] if isinstance(results[1], str) else torch.testing.assert_close(*results) is None
