"""Hooks: on tensors around the call they run as in eager; what a program registers itself runs it eagerly."""
import warnings

import gradients
import pytest
import torch
import vitrify
from beside import program
from gradients import check, leaf, leaves
from torch import nn

TWO = leaves((2, 3), (2, 3))


# ---- on tensors, from outside

def test_tensor_hooks_on_inputs_and_results():
    def then(out, args):
        log = []
        args[0].register_hook(lambda g: log.append(g.clone()) or g * 2)
        out[0].register_hook(lambda g: log.append(g.clone()) or g + 1)
        out[1].retain_grad()
        gradients.backward(out, args)
        return log, out[1].grad
    check(program("return x * y, x.sin()"), TWO, then=then)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.n, self.w = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.n(self.b(self.a(x).relu()) + self.a(x)) * self.w + self.w


@pytest.mark.parametrize("make", [lambda: nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(5)]), Shared, lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)],
                         ids=["layers", "shared", "transformer"])
@pytest.mark.parametrize("given", [lambda: torch.ones(3, 4), lambda: torch.ones(3, 4, requires_grad=True), lambda: torch.ones(3, 4, requires_grad=True) * 2],
                         ids=["data", "leaf", "result"])
def test_hooks_of_parameters_run_in_the_order_of_the_backward(make, given):
    m, orders = make(), []
    for name, p in m.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: orders[-1].append(name))
    for f in (m, vitrify.compile(m, fullgraph=True)):
        orders.append([])
        f(given()).sum().backward()
    assert len(orders[0]) == len(list(m.parameters())) and orders[1] == orders[0]


def test_post_accumulate_hooks():
    def then(out, args):
        log = []
        for a in args:
            a.register_post_accumulate_grad_hook(lambda t: log.append(t.grad.clone()))
        gradients.backward(out, args)
        return log
    check(program("return x * y"), TWO, then=then)


def test_hooks_on_parameters_run_once_a_backward(compiles):
    m = nn.Linear(3, 2)
    log = []
    m.weight.register_hook(lambda g: log.append("hook") or g * 10)
    m.weight.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.clone()))
    t = vitrify.compile(m)
    x = torch.randn(4, 3)
    for _ in range(2):
        t(x).sum().backward()
        m.weight.grad = None
    assert [type(i) for i in log] == [str, torch.Tensor] * 2
    torch.testing.assert_close(log[1], 10 * x.sum(0).expand(2, 3))
    torch.testing.assert_close(log[3], log[1])


def test_an_optimizer_in_the_backward(compiles):
    m = nn.Linear(3, 2)
    start = m.weight.detach().clone()

    @torch.no_grad()
    def step(p):
        p.sub_(0.1 * p.grad)
        p.grad = None
    for p in m.parameters():
        p.register_post_accumulate_grad_hook(step)
    t = vitrify.compile(m)
    x = torch.randn(4, 3)
    t(x).sum().backward()
    torch.testing.assert_close(m.weight.detach(), start - 0.1 * x.sum(0))
    t(x).sum().backward()
    torch.testing.assert_close(m.weight.detach(), start - 0.2 * x.sum(0))


def test_hooks_on_the_node(compiles):
    x = leaf(3)
    out = vitrify.compile(lambda x: x.sin())(x)
    log = []
    out.grad_fn.register_prehook(lambda g: log.append(len(g)) or (g[0] * 2,))
    out.grad_fn.register_hook(lambda grads, tangents: log.append(grads[0].clone()))
    out.sum().backward()
    assert log[0] == 1
    torch.testing.assert_close(x.grad, 2 * x.cos().detach())
    torch.testing.assert_close(log[1], x.grad)


def test_a_hook_that_raises(compiles):
    x = leaf(3)
    out = vitrify.compile(lambda x: x.sin())(x)

    def hook(g):
        raise ValueError("stop")
    out.register_hook(hook)
    with pytest.raises(ValueError, match="stop"):
        out.sum().backward()
    assert x.grad is None


def test_multi_grad_hooks():
    def then(out, args):
        log = []
        torch.autograd.graph.register_multi_grad_hook(args, lambda grads: log.append([g is not None for g in grads]))
        gradients.backward(out, args)
        return log
    check(program("return x * y"), TWO, then=then)


# ---- modules with hooks

@pytest.mark.eager("registers a gradient hook on a node")
def test_module_backward_hooks_run_eagerly():
    m = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    log = []
    m[0].register_full_backward_hook(lambda m, gi, go: log.append([g is not None for g in gi]))
    with pytest.warns(vitrify.VitrifyWarning, match="hook"):
        vitrify.compile(m)(leaf(2, 3)).sum().backward()
    assert log == [[True]]
    assert m[0].weight.grad is not None


def test_module_forward_hooks(compiles):
    m = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    m[0].register_forward_hook(lambda m, a, out: out * 2)
    x, y = leaf(2, 3), leaf(2, 3)
    vitrify.compile(m)(x).sum().backward()
    ours = [p.grad for p in m.parameters()]
    m.zero_grad()
    m(y).sum().backward()
    torch.testing.assert_close([x.grad, *ours], [y.grad, *(p.grad for p in m.parameters())])


# ---- registered inside

@pytest.mark.parametrize("text, reason", [
    ("z = x * 2; z.register_hook(lambda g: log.append(tuple(g.shape)) or g * 3); return z.sin() * y", "hook"),
    ("z = x * 2; z.retain_grad(); kept.append(z); return z.sin() * y", ""),
    ("z = x * 2; z.retain_grad(); return z.sin() * y", "retains the gradient"),
    ("x.register_hook(lambda g: log.append(tuple(g.shape)) or g * 3); return x * y", "hook"),
    ("x.register_post_accumulate_grad_hook(lambda t: log.append(1)); return x * y", "hook"),
    ("z = x * 2; z.grad_fn.register_hook(lambda a, b: log.append(len(a))); return z.sin() * y", "hook"),
    ("z = x * 2; z.grad_fn.register_prehook(lambda a: log.append(len(a))); return z.sin() * y", "hook"),
])
@pytest.mark.eager("registers a gradient hook, or retains", "registers a gradient hook on a node", "it registers a hook on a tensor", some=True)
def test_hooks_registered_inside_run_eagerly(text, reason):
    log, kept = [], []

    def then(out, args):
        log.clear()
        gradients.backward(out, args)
        return list(log), [k.grad for k in kept[-1:]]
    fn = program(text, log=log, kept=kept)
    compiled = vitrify.compile(fn)
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        for _ in range(3):
            gradients.same(gradients.Run(compiled, TWO(), then), gradients.Run(fn, TWO(), then))
    messages = [str(m.message) for m in w if issubclass(m.category, vitrify.VitrifyWarning)]
    assert vitrify.counters["compiled_calls"] == 0 and len(messages) == 1 and reason in messages[0], messages
    assert not any(vitrify._C.is_fake(k) for k in kept)


# ---- what holds saved tensors

def test_saved_tensor_hooks_see_what_is_saved():
    """Eager saves other tensors than we do; but every one of ours passes through the hooks, and gradients are those of what they gave back."""
    packed, unpacked = [], []

    def pack(t):
        packed.append(t.shape)
        return t.clone()

    def unpack(t):
        unpacked.append(t.shape)
        return t
    for fn in (lambda x, y: torch.tanh(x * y) @ y.t(), lambda x, y: (x.exp(), y.sin())):
        x, y = TWO()
        packed.clear(), unpacked.clear()
        with torch.autograd.graph.saved_tensors_hooks(vitrify.mark_lossless(pack), unpack):
            out = vitrify.compile(fn)(x, y)
        gradients.backward(out, [x, y])
        assert packed and sorted(packed) == sorted(unpacked)
        a, b = TWO()
        gradients.backward(fn(a, b), [a, b])
        torch.testing.assert_close([x.grad, y.grad], [a.grad, b.grad])
    assert vitrify.counters["compiled_calls"] == 5  # independent results each have a backward


@pytest.mark.eager("hooks on saved tensors, which may give back something else")
def test_saved_tensor_hooks_change_the_gradient():
    x = leaf(4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 3):
        out = vitrify.compile(lambda x: x * x)(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad, 6 * x.detach())


@pytest.mark.parametrize("dropout", [False, True])
def test_save_on_cpu(dropout):
    text = "return F.dropout(torch.tanh(x * y), 0.5)" if dropout else "return torch.tanh(x * y)"
    check(program(text), TWO, inner=torch.autograd.graph.save_on_cpu)


def test_saved_tensor_hooks_disabled():
    check(program("return torch.tanh(x * y)"), TWO, inner=lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"))


def test_saved_tensor_hooks_come_and_go():
    fn = vitrify.compile(lambda x: (x * x).sin())
    seen = []
    for hooked in (False, True, False, True):
        x, y = leaf(4), leaf(4)
        before = len(seen)
        if hooked:
            with torch.autograd.graph.saved_tensors_hooks(vitrify.mark_lossless(lambda t: seen.append(1) or t), lambda t: t):
                out = fn(x)
        else:
            out = fn(x)
        out.sum().backward()
        (y * y).sin().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        assert (len(seen) > before) == hooked


def test_saved_tensor_hooks_inside_run_once_at_capture_or_eagerly():
    def fn(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            return x * x
    x, y = leaf(4), leaf(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vitrify.compile(fn)(x).sum().backward()
    fn(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_hooks_of_captured_tensors_see_no_placeholders(compiles):
    """Whose gradients leave the program: they run when a gradient comes, whatever they do with it."""
    w = leaf(3)
    log = []
    w.register_hook(lambda g: log.append(type(g)) or g * 10)
    h = leaf(3) * 2
    h.register_hook(lambda g: log.append(g.sum().item()) or g * 2)
    kept = leaf(3)
    (kept * h).register_hook(lambda g: g)
    fn = vitrify.compile(lambda x: x * w * h)
    for _ in range(2):
        log.clear()
        x = leaf(3, seed=4)
        fn(x).sum().backward(inputs=[x, w])
        torch.testing.assert_close(x.grad, (w * h).detach())
        torch.testing.assert_close(w.grad, 10 * (x * h).detach())
        w.grad = None
        assert log == [torch.Tensor]
