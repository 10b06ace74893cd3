"""Gradients that are the tangent itself, a view of it, or a tensor that several leaves share: eager's engine takes what nobody else holds as .grad, in the strides it has, and
copies the rest in those of the leaf. Ours were memory of their own, which nobody else held."""
import pytest
import torch
import vitrify

PROGRAMS = {
    "sum": lambda x, w: x + w,
    "one": lambda x, w: x + 2,
    "three": lambda x, w: (x + w) + x.sin().detach() - w * 0.5,
    "shared behind": lambda x, w: (x + w).sin(),
    "shared view behind": lambda x, w: (x + w).t().exp(),
    "swapped": lambda x, w: (x + w).t() * w.t(),
    "views": lambda x, w: (x.unsqueeze(0), w.t()),
    "expanded": lambda x, w: (x + w).sum(0),
    "rotated": lambda x, w: torch.rot90(x + w, 1, (0, 1)),
    "in two results": lambda x, w: (x.nansum(0), (x.permute(1, 0) + w.t()).sigmoid()),
    "stacked": lambda x, w: torch.cat([x, w]),
    "of both": lambda x, w: (x + w, (x + w).t().sin()),
    "through another result": lambda x, w: (lambda y: (y, y + 1))(x + w),
}
# Ops of which ATen has the elements of a batch one by one, and stacks them.
BATCHES = PROGRAMS | {"clamped": lambda x, w: (x * w).clamp(max=0.3) + w.relu(), "chosen": lambda x, w: torch.where(x > 0.5, x, w).t() * 2, "largest": lambda x, w: torch.maximum(x, w) + x.amax(0)}
LAYOUTS = {
    "row": lambda: torch.rand(1, 33),
    "column": lambda: torch.rand(33, 1),
    "column, swapped": lambda: torch.rand(33).as_strided((33, 1), (1, 33)),
    "matrix": lambda: torch.rand(4, 3),
    "matrix, swapped": lambda: torch.rand(3, 4).t(),
}


def apart(w):
    """For eager's side where it gives two leaves views of one gradient, and counts each twice from the second on: compiled each has memory of its own (docs/differences.md)."""
    w.register_hook(lambda g: g.clone())


def facts(grads, tangents):
    """What can be seen of how they lie: strides, which are whose tensor, and which share memory."""
    found = []
    for i, g in enumerate(grads):
        if g is None:
            found.append(None)
            continue
        others = [*grads[:i], *tangents]
        found.append((g.stride(), [o is g for o in others], [o is not None and o.untyped_storage().data_ptr() == g.untyped_storage().data_ptr() for o in others]))
    return found


def tangents_of(out, how):
    made = [torch.rand(t.shape) for t in out]
    if how == "swapped":
        made = [torch.empty_strided(t.shape, t.t().contiguous().t().stride() if t.dim() == 2 else t.stride()).copy_(t) for t in made]
    return [t.expand_as(t) if how == "view" else t for t in made]


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("some programs are views and library calls", some=True)
@pytest.mark.parametrize("how", ["held", "swapped", "by another node", "grad", "differentiable", "differentiable, held", "hooked", "accumulated", "twice"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_gradients_are(name, layout, how):
    results = []
    for f in (vitrify.compile(PROGRAMS[name], fullgraph=True), PROGRAMS[name]):
        for _ in range(2):
            torch.manual_seed(0)
            x, w = LAYOUTS[layout]().requires_grad_(), LAYOUTS[layout]().requires_grad_()
            out = f(x, w)
            out = out if isinstance(out, tuple) else (out,)
            tangents, seen = tangents_of(out, how), []
            if how == "accumulated":
                x.grad = torch.ones_like(x)
            if how == "hooked":
                for t in (x, w):
                    t.register_hook(lambda g: seen.append((g.stride(), [g is t for t in tangents])))
            if how == "by another node":
                sum((t * g).sum() for t, g in zip(out, tangents)).backward()
            elif how in ("grad", "differentiable", "differentiable, held"):
                if how == "differentiable, held":
                    tangents = [t.detach().requires_grad_() for t in tangents]
                grads = torch.autograd.grad(out, (x, w), tangents, allow_unused=True, create_graph=how != "grad")
                seen += [g is not None and (g.requires_grad, g.is_leaf) for g in grads]
                again = [g.square().sum() for g in grads if g is not None and g.requires_grad]
                leaves = [t for t in (x, w, *tangents) if t.requires_grad]
                results.append((facts(grads, tangents), seen, [*grads, *(torch.autograd.grad(again, leaves, allow_unused=True) if again else [])]))
                continue
            else:
                torch.autograd.backward(out, tangents, retain_graph=how == "twice")
                if how == "twice":
                    torch.autograd.backward(out, tangents)
            results.append((facts((x.grad, w.grad), tangents), seen, (x.grad, w.grad)))
    for ours, eager in zip(results[:2], results[2:]):
        assert [g is None for g in ours[2]] == [g is None for g in eager[2]]
        torch.testing.assert_close([g for g in ours[2] if g is not None], [g for g in eager[2] if g is not None])
        assert ours[:2] == eager[:2]


@pytest.mark.sweep(5)
@pytest.mark.no_kernels("some programs are views and library calls", some=True)
@pytest.mark.parametrize("along", [0, -1])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BATCHES)
def test_gradients_of_batches(name, layout, dynamic, along):
    """Those were each memory of their own, and where sizes change in the strides of one after the other."""
    results = []
    for f in (vitrify.compile(BATCHES[name], fullgraph=True, dynamic=dynamic), BATCHES[name]):
        torch.manual_seed(0)
        x, w = LAYOUTS[layout]().requires_grad_(), LAYOUTS[layout]().requires_grad_()
        out = f(x, w)
        out = out if isinstance(out, tuple) else (out,)
        batches = [torch.rand(3, *t.shape) if along == 0 else torch.rand(*t.shape, 3).movedim(-1, 0) for t in out]
        grads = torch.autograd.grad(out, (x, w), batches, is_grads_batched=True, allow_unused=True)
        offsets = [g.storage_offset() for g in grads if g is not None]
        results.append((facts(grads, batches), offsets, [g for g in grads if g is not None]))
    torch.testing.assert_close(results[0][2], results[1][2])
    assert results[0][:2] == results[1][:2]


def test_a_write_to_the_one_is_one_to_the_other():
    f = lambda x: x.view(-1) + 0  # noqa: E731
    for c in (vitrify.compile(f, fullgraph=True), f):
        x, g = torch.rand(3, 4, requires_grad=True), torch.ones(12)
        c(x).backward(g)
        g.mul_(3)
        assert x.grad.sum() == 36


def test_gradients_that_are_differentiated():
    """A sum's are the tangent: a write to the one is one to the other. Also where it is expanded."""
    f = lambda x, w: x + w.sin()  # noqa: E731
    for c in (vitrify.compile(f, fullgraph=True), f):
        x, w = (torch.rand(3, 4, requires_grad=True) for _ in range(2))
        for t in (torch.ones(4, 3).t(), torch.ones(()).expand(3, 4)):
            g, other = torch.autograd.grad(c(x, w), (x, w), t, create_graph=True)
            assert g is t and other.requires_grad
            torch.testing.assert_close(other, w.cos())
        g = torch.autograd.grad(c(x, w), x, torch.ones(3, 4).requires_grad_(), create_graph=True)[0]
        assert g.is_leaf and g.requires_grad
        with torch.no_grad():
            t = torch.ones(3, 4)
        torch.autograd.grad(c(x, w), x, t, create_graph=True)[0][0].fill_(7)
        assert t.sum() == 8 + 28


LAZY = {
    "parts": lambda x, w: torch.complex(x, w),
    "parts of a conjugate": lambda x, w: torch.complex(x, w).conj(),
    "parts, swapped": lambda x, w: torch.complex(x, w).t().conj().reshape(-1),
    "real": lambda x, w: x.to(torch.complex64) + w * 1j,
    "sum": lambda x, w: x.view(-1) + w.view(-1),
    "sum of complex numbers": lambda x, w: torch.view_as_complex(torch.stack([x, w], -1)).view(-1) + 1,
    "inside": lambda x, w: torch.complex(x.sin(), w.cos()).conj().imag.view(-1),
}


def lazily(t, how):
    """`t`, by way of lazy bits."""
    if how == "conj" and t.is_complex():
        return t.conj_physical().conj()
    if how == "conj and neg" and t.is_complex():
        return torch._neg_view((-t).conj_physical().conj())
    if how == "imag" and not t.is_complex():
        return torch.complex(torch.zeros_like(t), -t).conj().imag
    return torch._neg_view(-t)


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("some programs are views and library calls", some=True)
@pytest.mark.parametrize("use", ["backward", "grad", "hooked", "differentiable"])
@pytest.mark.parametrize("how", ["conj", "neg", "conj and neg", "imag", "outside"])
@pytest.mark.parametrize("name", LAZY)
def test_lazily_conjugated_and_negated_tangents(name, how, use):
    results = []
    for f in (vitrify.compile(LAZY[name], fullgraph=True), LAZY[name]):
        for size in ((2, 3), (4, 3)):
            torch.manual_seed(0)
            x, w = (torch.rand(size, requires_grad=True) for _ in range(2))
            z = f(x, w)
            tangent, seen = torch.rand_like(z), []
            if use == "hooked":
                for t in (x, w):
                    t.register_hook(lambda g: seen.append(g.clone()))
            if how == "outside":
                z, tangent = (z.conj() * tangent.detach()).real.sum(), torch.tensor(2.0)
            else:
                tangent = lazily(tangent, how)
            if use in ("grad", "differentiable"):
                grads = torch.autograd.grad(z, (x, w), tangent, create_graph=use == "differentiable", allow_unused=True)
            else:
                z.backward(tangent)
                grads = x.grad, w.grad
            results.append((*grads, *seen))
    for ours, eager in zip(results[:2], results[2:]):
        assert [g is None for g in ours] == [g is None for g in eager]
        for a, b in zip(ours, eager):
            if a is not None:
                torch.testing.assert_close(a.resolve_neg(), b.resolve_neg())


def test_a_view_of_a_negated_tangent_is_one():
    f = lambda x, w: x.view(-1) + w.view(-1)  # noqa: E731
    for c in (vitrify.compile(f, fullgraph=True), f):
        x, w = (torch.rand(3, 4, requires_grad=True) for _ in range(2))
        t = torch._neg_view(torch.ones(12))
        g = torch.autograd.grad(c(x, w), (x, w), t)[0]
        assert g.is_neg()
        t.mul_(3)
        assert g.sum() == -36


SIZED = {
    "flat": lambda x, w: (x.flatten(1) + w.flatten(1)).square().sum(1),
    "flat, of a tangent": lambda x, w: x.flatten(1) + w.flatten(1),
    "all flat": lambda x, w: x.view(-1) + w.view(-1),
    "halved": lambda x, w: (x.view(x.shape[0] // 2, -1) + w.view(w.shape[0] // 2, -1)).sin(),
    "swapped": lambda x, w: (x.transpose(0, 2).reshape(6, -1) + w.transpose(0, 2).reshape(6, -1)).exp(),
    "cut": lambda x, w: torch.cat([x, w])[1:].view(-1),
    "cut in the middle": lambda x, w: (torch.cat([x, w], 1) * 2).split([3, 3], 1)[0],
    "windows": lambda x, w: x.unfold(0, 2, 2) + w.view(-1, 2, 3, 2).permute(0, 2, 3, 1),
    "expanded": lambda x, w: (x + w).sum(0),
    "grown": lambda x, w: (x + w).unsqueeze(0).expand(2, -1, -1, -1).tanh(),
}


@pytest.mark.sweep(3)
@pytest.mark.no_kernels("some programs are views and library calls", some=True)
@pytest.mark.parametrize("use", ["backward", "tangent", "hooked", "grad", "twice", "again", "accumulated"])
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", SIZED)
def test_what_gradients_are_where_sizes_change(name, dynamic, use):
    results = []
    for f in (vitrify.compile(SIZED[name], fullgraph=True, dynamic=dynamic), SIZED[name]):
        for n in (4, 6, 8):
            torch.manual_seed(0)
            x, w = (torch.rand(n, 3, 2, requires_grad=True) for _ in range(2))
            if f is SIZED[name] and use != "grad" and name in ("flat", "flat, of a tangent", "all flat", "halved", "swapped"):
                apart(w)
            y, seen = f(x, w), []
            tangent = torch.rand(y.shape)
            if use == "hooked":
                for t in (x, w):
                    t.register_hook(lambda g: seen.append((g.stride(), g.is_contiguous())))
            if use == "accumulated":
                x.grad = torch.ones_like(x)
            if use == "grad":
                grads = torch.autograd.grad(y, (x, w), tangent)
            else:
                if use == "backward":
                    y.sum().backward()
                else:
                    y.backward(tangent, retain_graph=use == "twice")
                if use == "twice":
                    y.backward(tangent)
                if use == "again":
                    try:
                        y.backward(tangent)
                    except RuntimeError as e:
                        seen.append(str(e)[:40])
                grads = x.grad, w.grad
            shown = facts(grads, [tangent])
            if 0 not in grads[0].stride():
                grads[0].mul_(3)
            results.append((shown, seen, (*grads, tangent)))
    for ours, eager in zip(results[:3], results[3:]):
        torch.testing.assert_close(ours[2], eager[2])
        assert ours[:2] == eager[:2]


AS_IT_COMES = {
    "windows": lambda x, w: x.unfold(0, 2, 2) + w.view(2, 4, 2),
    "swapped": lambda x, w: (x.t() + w.view(4, 4)).view(2, 2, 4),
    "cut": lambda x, w: torch.cat([x.view(2, 8), w.view(2, 8)]),
    "of two": lambda x, w: (x.view(2, 8).t() + w.view(8, 2), (x.view(-1) * 2).view(4, 4).t()),
    "not the leaf's": lambda x, w: (x.view(-1) + w.view(-1)).sin().view(2, 8),
}


@pytest.mark.no_kernels("some programs are views and library calls", some=True)
@pytest.mark.parametrize("how", ["contiguous", "swapped", "gaps", "expanded", "negated"])
@pytest.mark.parametrize("name", AS_IT_COMES)
def test_views_of_tangents_in_other_strides(name, how):
    """Also where nobody sees the strides of gradients: a write to the tangent is one to .grad."""
    results = []
    for f in (vitrify.compile(AS_IT_COMES[name], fullgraph=True), AS_IT_COMES[name]):
        for _ in range(3):
            torch.manual_seed(0)
            x, w = (torch.rand(4, 4, requires_grad=True) for _ in range(2))
            if f is AS_IT_COMES[name] and name in ("swapped", "not the leaf's"):
                apart(w)
            out = f(x, w)
            out = out if isinstance(out, tuple) else (out,)
            memory = [torch.rand(t.numel() * 2) for t in out]
            tangents = [m[: t.numel()].view(t.shape) for m, t in zip(memory, out)]
            if how == "swapped":
                tangents = [m[: t.numel()].view(t.shape[::-1]).permute(*reversed(range(t.dim()))) for m, t in zip(memory, out)]
            elif how == "gaps":
                tangents = [m.view(*t.shape, 2)[..., 0] for m, t in zip(memory, out)]
            elif how == "expanded":
                tangents = [m[: t[0].numel()].view(t[0].shape).expand(t.shape) for m, t in zip(memory, out)]
            elif how == "negated":
                tangents = [torch._neg_view(t) for t in tangents]
            torch.autograd.backward(out, tangents)
            shown = facts((x.grad, w.grad), tangents)
            for m in memory:
                m.mul_(3)
            results.append((shown, (x.grad, w.grad)))
    for ours, eager in zip(results[:3], results[3:]):
        torch.testing.assert_close([g.resolve_neg() for g in ours[1]], [g.resolve_neg() for g in eager[1]])
        assert ours[0] == eager[0]
