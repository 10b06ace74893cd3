"""grad(create_graph=True) of what has no second derivative, of a weight that the program reaches: which of its edges raise was asked in the user's backward, which asks for one of them only."""
import pytest
import torch
import vitrify

PROGRAMS = {"cdist": lambda x, w: torch.cdist(x, w), "itself": lambda x, w: torch.cdist(w, w), "p 1": lambda x, w: torch.cdist(w, x, p=1.0), "pdist": lambda x, w: torch.pdist(w), "beside": lambda x, w: torch.cdist(w, x) + w * w, "behind": lambda x, w: torch.cdist(w * 1, x)}


@pytest.mark.no_kernels("distances are library calls", some=True)
@pytest.mark.parametrize("how", ["grad", "second", "backward"])
@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients(name, captured, how):
    def told(compile):
        g = torch.Generator().manual_seed(0)
        w, x, seen = torch.rand(3, 3, generator=g).requires_grad_(), torch.rand(3, 3, generator=g), []
        f = compile((lambda x: PROGRAMS[name](x, w)) if captured else PROGRAMS[name])
        for _ in range(3):
            total = f(x).sum() if captured else f(x, w).sum()
            try:
                if how == "backward":
                    total.backward(create_graph=True)
                    seen.append(w.grad.tolist())
                    w.grad = None
                    continue
                first, = torch.autograd.grad(total, w, create_graph=True)
                seen.append(first.tolist())
                if how == "second":
                    seen.append(torch.autograd.grad(first.square().sum(), w)[0].tolist())
            except RuntimeError as e:
                seen.append(str(e)[:60])
        return seen
    ours, eager = told(lambda f: vitrify.compile(f, fullgraph=True)), told(lambda f: f)
    for a, b in zip(ours, eager, strict=True):
        if isinstance(b, str):
            assert a == b
        else:
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b))
