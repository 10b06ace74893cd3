"""What of a derivative is not implemented is tried within the caller's backward, of whose nodes the first, the root of several results, may be gone by then."""
import pytest
import torch
import vitrify
from torch.nn.functional import embedding_bag, pdist


def weighted(x):
    z = embedding_bag(torch.tensor([[0, 1, 2]] * x.shape[0]), x, per_sample_weights=x[:, :3].contiguous(), mode="sum")
    return z, z


PROGRAMS = {"pdist": lambda x: (lambda z: (z, z))(x * pdist(x).sum()), "of numbers": lambda x: (lambda z: (z, z))(pdist(x).sum()),
            "different": lambda x: (lambda z: (z, z * 2))(x * pdist(x).sum()), "embedding": weighted, "view": lambda x: (lambda z: (z, z.view(-1)))(x * pdist(x).sum())}


@pytest.mark.no_kernels("some are calls of ATen", some=True)
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_results(name):
    def told(compile):
        seen = []
        for i in range(30):
            f, x = compile(PROGRAMS[name]), torch.arange(4.0 * (4 + i % 3)).sin().view(-1, 4).double().requires_grad_()
            for _ in range(2):
                y = f(x)
                try:
                    g, = torch.autograd.grad(y, [x], [torch.ones_like(q) for q in y], create_graph=True)
                    seen.append(g.detach())
                    torch.autograd.grad(g.square().sum(), [x])
                except RuntimeError as e:
                    seen.append(type(e))
        return seen
    for ours, eager in zip(told(vitrify.compile), told(lambda f: f), strict=True):
        assert ours is eager if isinstance(eager, type) else torch.testing.assert_close(ours, eager) is None
