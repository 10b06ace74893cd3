"""Results behind one another that lead to nothing but leaves of the program's own, of a program that writes what it was given: gradients on their way through one read what was written."""
import pytest
import torch
import vitrify

RESULTS = {"a product": lambda g, v: (g * v, g), "a part": lambda g, v: (lambda h: (h * v, h))(g.narrow(0, 0, 1)), "three": lambda g, v: (g * v, g, (g + v).sin()), "one": lambda g, v: (g * v,)}


@pytest.mark.eager("results behind one another that lead to nothing but leaves of its own", some=True)
@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("writes", [False, True], ids=["", "writes"])
@pytest.mark.parametrize("made", RESULTS)
def test_results_that_lead_to_a_leaf_of_the_programs(made, writes, dynamic, again):
    def f(x):
        v = torch.expm1(-x.abs())
        leaf = v.clone().requires_grad_(True)
        if writes:
            x.diagonal().fill_(2)
        return RESULTS[made](torch.autograd.grad(leaf.pow(3).sum(), leaf, create_graph=True)[0], v)
    compiled = vitrify.compile(f, dynamic=dynamic)
    for n in (5, 7):
        told = []
        for g in (compiled, f):
            x = torch.linspace(-1, 1, n * n).view(n, n)
            out, said = g(x), []
            for _ in range(1 + again):
                try:
                    sum(t.sin().sum() for t in out).backward()
                except RuntimeError as e:
                    said.append(str(e).partition("\n")[0])
            told.append(([t.detach() for t in out], x, said))
        torch.testing.assert_close(told[0][:2], told[1][:2])
        assert told[0][2] == told[1][2]
