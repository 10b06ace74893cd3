"""Views, writes, aliasing and metadata: programs that a capture gets wrong if done naively."""
import copy
import pickle
import threading
import warnings

import pytest
import torch
import vitrify
from beside import MODES, cases, check, program, steps


# ---- views and writes: what is recorded, and the epilogue that eager promises

VIEWS = [
    # a view of an input written and returned; through detach; through .data, which counts no version; twice, which counts two
    ("v = x[0]; v.mul_(2); return v", {}),
    ("d = x.detach(); z = x * 2; d.add_(5); return z, x.detach()", {}),
    ("x.data.add_(1); return x * 2", {}),
    ("x.add_(1); z = x * 2; x.sub_(1); return z", {}),
    ("x.add_(1e8); x.sub_(1e8); return x", {}),
    ("x += 1; x *= 2; x[0] -= 1; return x", {}),
    # results that are views of each other, of inputs, of many, or objects that eager hands back
    ("z = x * 2; return z, z[0], z.t()", {}),
    ("return x.unbind(0)", {"launches": False}),
    ("return x.split(1), x.chunk(2, 1), x + 1", {}),
    ("return x, x[:], x.detach(), x.contiguous(), x.to(x.dtype), x.reshape(x.shape), x.view_as(x), x.float(), x + 1", {}),
    ("return [x + 1] * 2", {}),
    ("z = x + 1; return z, z.view(-1), z", {}),
    ("return x.clone(), x * 1, x + 0", {}),
    ("return x.flatten(), x.t().flatten(), x.ravel(), x.T, x.mT + 1, x.H, x.real, x[:1].expand_as(x), x.view(torch.int32)", {}),
    ("return x[..., None], x[None], x[:, [0, 2]], x[torch.tensor(1)], x[1, 2], x[-1], x[::2], x + 1", {}),
    ("return x.as_strided((2, 2), (1, 2)) + 1", {}),
    # metadata in place is replayed on the real object
    ("x.t_(); x.unsqueeze_(0); return x + 1", {}),
    ("x.t_(); return x", {"launches": False}),
    ("x.t_(); x.mul_(2); return x, x.sum()", {}),
    # writes from another tensor, to another, into every kind of view, and into what the program made
    ("x.copy_(torch.arange(3.0)); return x * 2", {}),
    ("x.mul_(y); return x + 1", {"make": steps((2, 3), (3,))}),
    ("x[0].mul_(y); return x + 1", {"make": steps((2, 3), (3,))}),
    ("t = x.clone(); x.copy_(y); y.copy_(t); return x + y", {"make": steps((2, 3), (2, 3))}),
    ("x[0, 0] = 5; x[:, 1] = x[:, 0]; x.diagonal().zero_(); x.t()[0].fill_(3); x.narrow(0, 0, 1).neg_(); return x * 2", {}),
    ("x[...] = 1; x[:, ::2] = torch.tensor([3., 4.]); return x + 1", {}),
    ("x.movedim(0, 1)[0] = 1; x.expand(2, 2, 3)[0, 0].neg(); return x * 2", {}),
    ("x[x > 2] = 0; x.masked_fill_(x < 0, 1); return x + 1", {}),
    ("x[torch.tensor([0, 1])] = 7; x[[0, 1]] = x[[1, 0]]; return x + 1", {}),
    ("x.index_put_((torch.tensor([0, 0]),), torch.ones(2, 3), accumulate=True); return x + 1", {}),
    ("x.index_add_(0, torch.tensor([0, 1, 0]), torch.ones(3, 3)); x.scatter_(0, torch.tensor([[0, 1, 0]]), 5.0); return x", {}),
    ("a, b = x.split(1); a.add_(1); return b * 2, x", {}),
    ("z = x.relu(); z.add_(1).mul_(2); v = z.view(-1); v[0] = 9; return z, v", {}),
    ("z = x + 1; v = z[0]; z.mul_(2); return v, z", {}),
    ("s = x.sum(); s.add_(1); return s, x * s, x[:0].add_(1), x[:0].sum()", {}),
    ("F.relu(x, inplace=True); F.dropout(x, 0.0, training=True, inplace=True); return x.clamp_(max=2)", {}),
    ("torch._foreach_add_([x, y], 1); return [*torch._foreach_mul([x, y], 2), x + y]", {"make": steps((2, 3), (2, 3))}),
    ("x.grad = y; return x + 1", {"make": steps((2,), (2,))}),
    # out=
    ("o = torch.empty(2, 3); r = torch.mul(x, 2, out=o); return r is o, o", {}),
    ("o = torch.empty(2, 3, dtype=torch.float64); torch.mul(x, 2, out=o); return o", {}),
    ("return torch.mul(x, 2, out=y)", {"make": steps((2, 3), (2, 3))}),
    ("torch.mul(x, 2, out=y[0]); return y", {"make": steps((3,), (2, 3))}),
    ("x.resize_(2); return x + 1", {}),
    ("z = x * 2; z.resize_(6); return z[:2] + 1", {}),
    ("z = x * 2; z.resize_(2, 2); return z + 1, x", {}),
    # bits of a tensor
    ("z = torch.view_as_complex(x.view(-1).reshape(3, 2)); return torch.view_as_real(z * 2), z.real + 1", {}),
    ("z = torch.complex(x, x + 1); c = z.conj(); return c, torch.view_as_real(c.resolve_conj()), c.imag, z.real * 2, c.is_conj()", {}),
    ("return x.grad is None, x.is_leaf, getattr(x, 'names', None), x.stride(), x.storage_offset(), x.untyped_storage().size(), x + len(f'{x.shape}')", {}),
    ("assert x.shape[0] == 2 and x.dtype is torch.float32; torch._check(x.dim() == 2); torch._assert_async((x > 0).all()); return x + 1", {}),
    ("return x + torch.tensor([1., 2., 3.]), torch.tensor(5), x[: int(torch.tensor(1))] + torch.tensor(3.0).item()", {}),
]


@pytest.mark.sweep(3)
@MODES
@cases(VIEWS)
def test_views_and_writes(text, more, around, grad):
    check(program(text), **{"make": steps((2, 3)), **more}, around=around, grad=grad)


def views_of(size, *slices):
    def make():
        t = torch.arange(float(size))
        return [t[s] for s in slices]
    return make


def with_transpose():
    t = torch.arange(9.0).reshape(3, 3)
    return [t, t.t()]


REFUSED = [
    ("x.mul_(2); return x + y", {"make": views_of(12, slice(0, 8), slice(4, 12)), "reason": "shares memory with input"}),
    ("x.mul_(2); y.add_(1); return x + y", {"make": with_transpose, "reason": "shares memory with input"}),
    ("return x.as_strided((2,), (1,), 2) + 1", {"make": views_of(8, slice(0, 2)), "reason": "as_strided reaches outside its tensor"}),
    ("x.unfold(1, 2, 1)[0, 0] = 9; return x * 2", {"reason": "writes to a tensor that overlaps itself"}),
    ("y = x.t(); z = y * 2; z.resize_(2); return z + 1", {"reason": "resize_"}),
    ("x.set_(y); return x + 1", {"make": steps((2,), (2,)), "reason": "set_"}),
    ("x.data = y; return x + 1", {"make": steps((2,), (2,)), "reason": "assigns to the .data"}),
    ("return nn.Parameter(x * 2, requires_grad=False)", {"reason": "returns a new Parameter"}),
    ("x.requires_grad_(); return x.detach() * 2", {"reason": "changes the requires_grad"}),
    ("x.tag = 3; return x + 1", {"reason": "sets attributes of a tensor (tag)"}),
    ("z = x + 1; z.tag = 3; return z", {"reason": "attributes of its own (tag)"}),
    ("return x + x.data_ptr() * 0", {"reason": "data cannot be read"}),
    ("return x + len(repr(x))", {"reason": "data cannot be read"}),
    ("return x + float(x.numpy()[0, 0])", {"reason": "data cannot be read"}),
    ("return x + x.tolist()[0][0]", {"reason": "looks into the memory of a tensor, as tolist() does"}),
    ("return torch.from_dlpack(x) + 1", {"reason": "data cannot be read"}),
    ("return pickle.loads(pickle.dumps(x)) + 1", {"reason": "looks at those it has"}),
    ("return copy.deepcopy(x) + 1", {"reason": "data cannot be read"}),
    ("return x.to_sparse().to_dense() + 1", {"reason": "_to_sparse"}),
    ("return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()", {"reason": "quantize"}),
    ("return torch.empty_like(x, device='meta').shape[0] + x", {"reason": "does not lie on the CPU"}),
    ("return x.as_subclass(Sub) * 2", {"reason": "neither an argument nor reachable"}),
    ("return torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (x,))", {"reason": "torch.compile"}),
    ("t = threading.Thread(target=lambda: x + 1); t.start(); t.join(); return x + 1", {"reason": "starts a thread"}),
    ("return x + 1", {"make": lambda: [torch._efficientzerotensor(3)], "reason": "zero tensor"}),
    # errors of real kernels that Meta kernels do not have
    ("x[0].expand(3, 3).add_(1); return x", {"reason": ""}),
    ("x.view(-1)[1:].copy_(x.view(-1)[:-1]); return x", {"reason": ""}),
    ("return torch.add(x.view(-1)[1:], 1, out=x.view(-1)[:-1])", {"reason": ""}),
    ("return x.add_(1)", {"make": lambda: [torch.ones(1, 3).expand(4, 3)], "reason": ""}),
    ("return (x * 2)[0].detach_()", {"reason": ""}),
]


class Sub(torch.Tensor):
    pass


@cases(REFUSED)
def test_refused(text, more):
    check(program(text, pickle=pickle, copy=copy, threading=threading, Sub=Sub), **{"make": steps((2, 3)), **more})


@pytest.mark.compiled("only views are made")
def test_a_view_of_many_cannot_be_written_by_the_caller():
    """Made with autograd on, one unbind for all: eager's error must come."""
    f, x = vitrify.compile(lambda x: x.unbind(0)), torch.ones(2, 3)
    for g in (f, f, lambda x: x.unbind(0)):
        with torch.enable_grad(), pytest.raises(RuntimeError, match="view"):
            g(x)[0].mul_(torch.ones(3, requires_grad=True))


@pytest.mark.compiled("only a view is made")
def test_a_view_made_under_no_grad_keeps_eagers_error():
    def f(x):
        with torch.no_grad():
            return x[0]

    for g in (vitrify.compile(f), f):
        with pytest.raises(RuntimeError, match="no_grad mode"):
            g(torch.ones(2, 3)).mul_(torch.ones(3, requires_grad=True))


def test_a_leaf_that_requires_grad_is_not_written():
    def f(w, x):
        return w.add_(x)

    w = torch.ones(3, requires_grad=True)
    for g in (vitrify.compile(f), f):
        with warnings.catch_warnings(), pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            warnings.simplefilter("ignore")
            g(w, torch.ones(3))
    with torch.no_grad():
        check(f, lambda: [torch.ones(3, requires_grad=True), torch.ones(3)])


@pytest.mark.eager("which shares memory with input")
def test_one_call_with_shared_inputs_does_not_spoil_the_others(delta):
    def f(x, y):
        x.mul_(2)
        return x + y

    g = vitrify.compile(f)
    for shared in (True, False, True, False):
        a, b = ([t[:4], t[:4]] if shared else [t[:4].clone(), t[:4].clone()] for t in (torch.arange(6.0), torch.arange(6.0)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", vitrify.VitrifyWarning)
            torch.testing.assert_close(g(*a), f(*b))
        torch.testing.assert_close(a, b)
    assert delta.captures == 1 and delta.compiled_calls == 2 and delta.eager_calls == 2


@pytest.mark.eager("a named tensor cannot be an input")
@pytest.mark.skipif(not hasattr(torch.Tensor, "names"), reason="torch 2.15 has no named tensors")
def test_named_tensors_run_eagerly():
    with pytest.warns(vitrify.VitrifyWarning, match="a named tensor"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Named tensors")
        assert vitrify.compile(lambda x: x + 1)(torch.ones(2, names=("a",))).names == ("a",)
