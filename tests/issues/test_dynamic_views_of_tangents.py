"""Where sizes differ from call to call, gradients that are views of the tangent by those sizes were copies if they could be differentiated, or if the
tangent has gaps; and a view that is returned beside what is computed of it was no view."""
import pytest
import torch
import vitrify

PROGRAMS = {
    "view": lambda x: (x + 1).view(x.shape[0] // 2, x.shape[1] * 2),
    "flattened": lambda x: (x + 1).view(-1),
    "swapped": lambda x: (x + 1).t().reshape(-1),
    "permuted": lambda x: (x + 1).view(x.shape[0], 2, -1).permute(2, 0, 1),
    "unsqueezed": lambda x: (x + 1)[None],
}
TANGENTS = {
    "ones": lambda s: torch.ones(s),
    "gaps": lambda s: torch.ones([2 * n for n in s])[tuple(slice(None, None, 2) for _ in s)],
    "swapped": lambda s: torch.ones(s[::-1]).permute(*range(len(s))[::-1]),
    "expanded": lambda s: torch.ones(s[:-1] + (1,)).expand(s),
}


@pytest.mark.no_kernels("gradients are views", some=True)
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("how", TANGENTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_views_of_tangents(name, how, differentiable):
    seen = []
    for f in (vitrify.compile(PROGRAMS[name], fullgraph=True, dynamic=True), PROGRAMS[name]):
        for size in ((4, 4), (6, 8), (4, 4)):
            x = torch.rand(size, requires_grad=True) * 1
            out = f(x)
            tangent = TANGENTS[how](tuple(out.shape))
            (g,) = torch.autograd.grad(out, x, tangent, create_graph=differentiable)
            alias = g.untyped_storage().data_ptr() == tangent.untyped_storage().data_ptr()
            seen.append((g.stride(), alias, g.requires_grad))
            if alias and how != "expanded":
                g.mul_(2)
                seen.append(tangent.sum().item())
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


@pytest.mark.no_kernels("gradients are views", some=True)
@pytest.mark.parametrize("name", PROGRAMS)
def test_views_of_tangents_have_gradients(name):
    results = []
    for f in (vitrify.compile(PROGRAMS[name], fullgraph=True, dynamic=True), PROGRAMS[name]):
        for size in ((4, 4), (6, 8)):
            torch.manual_seed(0)
            x = torch.rand(size, requires_grad=True) * 1
            out = f(x)
            tangent = torch.rand(out.shape, requires_grad=True)
            (g,) = torch.autograd.grad(out, x, tangent * 2, create_graph=True)
            results += torch.autograd.grad(g.sin().sum(), tangent)
    for ours, eager in zip(results[:2], results[2:]):
        assert ours.stride() == eager.stride()
        torch.testing.assert_close(ours, eager)


def test_view_beside_what_is_computed_of_it():
    def f(x, w):
        v = (x * 2)[1:]
        return v, w * v.sum()

    c = vitrify.compile(f, fullgraph=True, dynamic=True)
    results = []
    for g in (c, f):
        for n in (4, 6):
            torch.manual_seed(0)
            x, w = torch.rand(n, 4, requires_grad=True), torch.rand(n, 4, requires_grad=True)
            v, u = g(x, w)
            with pytest.raises(RuntimeError, match="Can't detach views in-place"):
                v.detach_()
            heard = []
            v.register_hook(lambda t: heard.append(t))
            results += [*torch.autograd.grad((v, u), (x, w), (torch.ones_like(v), u.detach())), *heard]
    torch.testing.assert_close(results[: len(results) // 2], results[len(results) // 2 :])
