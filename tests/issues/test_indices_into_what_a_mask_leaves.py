"""An index is looked at also where a mask has left nothing to take by it: a kernel without elements never came to it."""
import pytest
import torch
import vitrify

PROGRAMS = {"index_select": lambda x, m, k, i: x[m].index_select(-1, i), "rows": lambda x, m, k, i: x[:, k].index_select(0, i + 3), "gather": lambda x, m, k, i: x[m].gather(1, i.expand(x[m].shape[0], 3)), "index": lambda x, m, k, i: x[m][:, i],
            "embedding": lambda x, m, k, i: torch.nn.functional.embedding(i + 3, x[:, k]), "embedding of a mask's": lambda x, m, k, i: torch.nn.functional.embedding(i, x[m].t()[:2]), "index_add": lambda x, m, k, i: x[m].index_add(1, i, torch.ones(x[m].shape[0], 3)),
            "index_copy": lambda x, m, k, i: x[m].index_copy(1, i, torch.ones(x[m].shape[0], 3)), "index_fill": lambda x, m, k, i: x[m].index_fill(1, i, 3.0), "take_along": lambda x, m, k, i: x[m].take_along_dim(i.expand(1, 3), 1)}


@pytest.mark.eager("a size that follows from content is not what the plan is for", some=True)
@pytest.mark.parametrize("after", ["plain", "times", "sum", "unused"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_errors(name, dynamic, after):
    take = PROGRAMS[name]

    def f(x, m, k, i):
        r = take(x, m, k, i)
        return {"plain": lambda: r, "times": lambda: r * 2, "sum": lambda: r.sum(), "unused": lambda: x * 3}[after]()
    x, two, none = torch.arange(12.0).view(6, 2), torch.arange(6) < 2, torch.zeros(6, dtype=torch.bool)
    compiled, good, bad = vitrify.compile(f, dynamic=dynamic), torch.tensor([0, 1, 1]), torch.tensor([0, 5, 1])

    def told(run, *args):
        try:
            return run(x, *args).tolist()
        except (IndexError, RuntimeError) as e:
            return str(e).partition("\n")[0]
    with torch.no_grad():
        for args in ((two, two[1:3], good), (none, none[:2], good), (none, none[:2], bad), (two, two[:2], bad), (two, two[:2], good)):
            assert told(compiled, *args) == told(f, *args), args
