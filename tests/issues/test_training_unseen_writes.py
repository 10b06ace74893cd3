"""What is written between forward and backward where no version counts it: eager's derivative reads what it has saved, and what it computed is as it was."""
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import vitrify
from beside import same_outcome

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))
import gradients  # noqa: E402
from gradients import check, leaf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")

N = (7, 33)

# Of x (input, needs gradients), w and b (parameters), s (a buffer). Results of a list are written too.
CHAINS = {
    "a quotient of a chain": lambda x, w, b, s: torch.addcdiv(x, x, torch.abs(x) + 1),
    "two functions": lambda x, w, b, s: x.sin().cos(),
    "a long chain": lambda x, w, b, s: ((x * w + b).tanh() * s).exp().sin(),
    "a function of a saved buffer": lambda x, w, b, s: F.logsigmoid(x * 1) + F.logsigmoid(x),
    "a mask": lambda x, w, b, s: (x * w).masked_fill(s > 1.0, 0.0).sin(),
    "a mask that is where": lambda x, w, b, s: torch.where(s.cos() > 0.2, x * w, b.sin()),
    "a buffer's function": lambda x, w, b, s: (x * s.exp()).sin() + b,
    "rows of a layer norm": lambda x, w, b, s: F.layer_norm(x, N[1:], w, b).sin(),
    "rows of a layer norm into a product": lambda x, w, b, s: F.layer_norm(x.sin(), N[1:], w, b) @ w.unsqueeze(1),
    "rows of a layer norm of an input into a product": lambda x, w, b, s: F.layer_norm(x, N[1:], w, b) @ w.unsqueeze(1),
    "weight of a norm": lambda x, w, b, s: F.linear(x, (w * (s / s.norm())).expand(3, -1).contiguous()),
    "views": lambda x, w, b, s: (x.t()[1:20].t().sin().cos() * w[1:20].exp()).tanh(),
    "a product": lambda x, w, b, s: (x.cos() @ (w.unsqueeze(1) * s.unsqueeze(1).sin())).sin(),
    "a result that is read": lambda x, w, b, s: [(y := (x * w).exp()), y.sin().cos() * b],
    "a result made of an input": lambda x, w, b, s: [(y := x.sin().exp()), (y * s).tanh() * w],
    "a result that nothing reads": lambda x, w, b, s: [(y := x * w), (y + 1).sin().cos()],
    "rows of a layer norm as a result": lambda x, w, b, s: [(y := F.layer_norm(x, N[1:], w, b)), (y.sin() @ w.unsqueeze(1)).cos()],
    "a result of a product": lambda x, w, b, s: [(y := x @ torch.outer(w, w)), y.cos().exp()],
}


def data(t):
    t.data.mul_(2)


def numpy(t):
    a = t.detach().numpy()
    a[...] = a * 2 + 1


def counted(t):
    with torch.no_grad():
        t.mul_(2)


def write_in_between(out, args, write, what):
    out = out if isinstance(out, list) else [out]
    write(args[what] if what < 4 else out[what - 4])
    heads = gradients.differentiable(out)
    return torch.autograd.grad(heads, [a for a in args if a.requires_grad], gradients.weights(heads), allow_unused=True)


def make(layout="contiguous"):
    x = leaf(*N, dtype=torch.float64)  # where rounding does not matter
    if layout == "transposed":
        x = leaf(*N[::-1], dtype=torch.float64).detach().t().requires_grad_(True)
    if layout == "with gaps":
        x = leaf(N[0], 2 * N[1], dtype=torch.float64).detach()[:, ::2].requires_grad_(True)
    return [x, *(leaf(N[1], seed=i, dtype=torch.float64, grad=i < 4) for i in (2, 3, 4))]


WHAT = ["input", "weight", "bias", "buffer", "result", "second result"]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("write", [data, numpy, counted])
@pytest.mark.parametrize("chain, what", [pytest.param(c, i, id=f"{c}, {what}") for c in CHAINS for i, what in enumerate(WHAT) if i < 4 or "result" in c])
def test_written_in_between(chain, what, write):
    check(CHAINS[chain], make, then=lambda out, args: write_in_between(out, args, write, what), calls=2)


@pytest.mark.parametrize("layout", ["transposed", "with gaps"])
@pytest.mark.parametrize("chain", ["a quotient of a chain", "two functions", "a long chain", "rows of a layer norm", "views", "a result that is read"])
def test_inputs_in_other_layouts(chain, layout):
    check(CHAINS[chain], lambda: make(layout), then=lambda out, args: write_in_between(out, args, data, 0), calls=2)


@pytest.mark.parametrize("what", range(5), ids=WHAT[:5])
@pytest.mark.parametrize("only", [0, 1])
def test_through_one_of_the_results(only, what):
    def then(out, args):
        data(args[what] if what < 4 else out[0])
        out[only].sum().backward()
    for chain in CHAINS:
        if "result" in chain:
            check(CHAINS[chain], make, then=then, calls=2)


@pytest.mark.parametrize("what", range(4), ids=WHAT[:4])
def test_twice(what):
    def then(out, args):
        out.sum().backward(retain_graph=True)
        data(args[what])
        out.sum().backward()
    for chain in CHAINS:
        if "result" not in chain:
            check(CHAINS[chain], make, then=then, calls=2)


DIVISIONS = {
    "a quotient": lambda h, b: (h / b) * h,
    "a quotient alone": lambda h, b: h / b,
    "a tangent": lambda h, b: (h * b).tanh() * h.sin() * b,
    "a norm": lambda h, b: torch.nn.functional.layer_norm(h, (3,), b) * b,
}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("write", [0, 1], ids=["argument", "divisor"])
@pytest.mark.parametrize("name", DIVISIONS)
def test_derivatives_that_compute_what_the_program_did(name, write, order):
    """A derivative's own quotient was taken for the program's, which was of what it read by then."""
    def run(f):
        x, b = torch.tensor([1.0, 2, 4], requires_grad=True), torch.tensor([1.0, 3, 2], requires_grad=True)
        h, c = x * 1, b * 1
        y = f(h, c)
        data((h, c)[write])
        grads = torch.autograd.grad(y.sum(), [x, b], create_graph=True)
        for _ in range(order - 1):
            grads = torch.autograd.grad(sum(g.sum() for g in grads if g.requires_grad), [x, b], create_graph=True)
        return grads
    torch.testing.assert_close(run(vitrify.compile(DIVISIONS[name], fullgraph=True)), run(DIVISIONS[name]))


OF_RESULTS = {
    "largest": lambda x: (x * x).amax(1), "smallest": lambda x: (x * x).amin(1), "sqrt": lambda x: (x * x + 1).sqrt(), "rsqrt": lambda x: (x * x + 1).rsqrt(),
    "reciprocal": lambda x: (x * x + 1).reciprocal(), "logsumexp": lambda x: (x * x).logsumexp(1), "std": lambda x: (x * x).std(1), "hypot": lambda x: torch.hypot(x * x, x),
    "exp": lambda x: (x / 10).exp(), "tanh": lambda x: (x / 10).tanh(), "softmax": lambda x: (x * x / 10).softmax(1),
}


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("write", [data, numpy, counted])
@pytest.mark.parametrize("name", OF_RESULTS)
def test_results_written_before_gradients_of_gradients(name, write, order):
    """The second order computed again from a result, as it was by then, what eager's first backward had computed and saved."""
    def run(f):
        x = torch.tensor([[1.0, 2], [4, 3]], dtype=torch.float64, requires_grad=True)
        y = f(x)
        g, = torch.autograd.grad(y.sum(), x, create_graph=True)
        for _ in range(order - 2):
            g, = torch.autograd.grad(g.square().sum(), x, create_graph=True)
        write(y)
        try:
            return torch.autograd.grad(g.square().sum(), x)
        except RuntimeError as e:
            return str(e).partition(":")[0]
    same_outcome(run, OF_RESULTS[name])


WRITTEN = {
    "a function": lambda h, b: (h.exp_(), h * 2)[1], "alone": lambda h, b: h.exp_(), "read again": lambda h, b: (h.mul_(2), h.sin() * h.cos())[1],
    "copied from a value": lambda h, b: (lambda v: (b.copy_(v.detach()), v * 2)[1])(h.exp()), "a buffer": lambda h, b: (b.mul_(2), h * b)[1],
    "a buffer in a chain": lambda h, b: (b.exp_(), (h * b.sin()).tanh())[1], "of the same value": lambda h, b: (b.copy_(h.detach()).exp_(), h.exp() * 1)[1],
    "a row": lambda h, b: (b[0].mul_(2), h * b)[1], "through a view": lambda h, b: (b.t().mul_(2), h * b)[1],
    "through a view's .data": lambda h, b: (b.movedim(-1, 0).data.exp_(), torch.addcmul(h, h, b))[1],
    "a row that is read": lambda h, b: (v := b.detach()[:2], v.data.exp_(), h[:2] * v)[2], "copied": lambda h, b: (s := b.sin(), b.data.copy_(s), h * b * s)[2],
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "with gaps"])
@pytest.mark.parametrize("write", [data, numpy, counted])
@pytest.mark.parametrize("which", [0, 1], ids=["argument", "buffer"])
@pytest.mark.parametrize("name", WRITTEN)
def test_written_arguments_written_again(name, which, write, layout, order):
    """What the program writes to an argument is the argument's memory from then on, of which eager has saved it: a copy was kept."""
    def run(f):
        x = torch.arange(0.1, 1.2, 0.1, dtype=torch.float64)[:9].view(3, 3).requires_grad_()
        given = [x * 1, x.detach() * 2]
        if layout == "transposed":
            given = [t.t().contiguous().t() for t in given]
        elif layout == "with gaps":
            given = [torch.cat([t, t], 1)[:, :3] for t in given]
        y = f(*given)
        g, = torch.autograd.grad(y.sum(), x, create_graph=True) if order == 2 else [y]
        write(given[which])
        try:
            return torch.autograd.grad(g.square().sum(), x)
        except RuntimeError as e:
            return str(e).partition(":")[0]
    same_outcome(run, WRITTEN[name])


WRITTEN_RESULTS = {
    "through a view": lambda x: (y := x.detach().exp(), y.t().mul_(2), x * y)[::2], "through a view's .data": lambda x: (y := x.detach().exp(), y.t().data.exp_(), x * y)[::2],
    "detached": lambda x: (y := x.exp().detach(), y.t().data.mul_(2), x * y)[::2], "a part": lambda x: (y := torch.zeros(3, 3, dtype=x.dtype), v := y[:2], v.copy_(x.detach()[:2]), v * x[:2])[::3],
    "a part that is returned": lambda x: (v := torch.zeros(3, 3, dtype=x.dtype)[:2], v.copy_(x.detach()[:2]), v * x[:2])[::2],
}


@pytest.mark.parametrize("write", [data, numpy, counted])
@pytest.mark.parametrize("name", WRITTEN_RESULTS)
def test_written_results_written_again(name, write):
    """What was written through a view had been kept as the value that was written, and not as the result's memory."""
    def run(f):
        x = torch.arange(0.1, 1.2, 0.1, dtype=torch.float64)[:9].view(3, 3).requires_grad_()
        y, product = f(x)
        write(y)
        try:
            return torch.autograd.grad(product.sum(), x)
        except RuntimeError as e:
            return str(e).partition(":")[0]
    same_outcome(run, WRITTEN_RESULTS[name])


# A result that is the only view of what eager has saved, and others that read that.
def saved_view(of, view, read):
    def f(x):
        v = view(of(x))
        return v, read(v)
    return f


MADE = {"sin": lambda x: (x * 2).sin(), "a product": lambda x: x @ x.mT @ x, "tanh": torch.tanh}
SEEN = {"transposed": lambda v: v.mT, "rows": lambda v: v[1:], "flat": lambda v: v.view(-1), "reshaped": lambda v: v.view(3, -1), "a view of a view": lambda v: v.mT[1:], "written": lambda v: v.mT.mul_(2), "not a view": lambda v: v}
READ = {"cos": lambda v: v.cos(), "a chain": lambda v: v.cos().tanh(), "a product": lambda v: v.reshape(-1) @ v.reshape(-1).sin(), "its base": lambda v: (v if v._base is None else v._base).cos(), "a function": lambda v: Squared.apply(v)}


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("seen, read, write", [(s, r, w) for s in SEEN for r in READ for w in (data, numpy, counted) if w is not counted or s != "written"])  # its versions begin anew
@pytest.mark.parametrize("made", MADE)
def test_the_only_view_of_what_was_saved(made, seen, read, write):
    """It was a tensor of its own, whose writes the derivative did not see."""
    def then(out, args):
        write(out[0])
        loss = (out[1] * torch.linspace(-1, 1, out[1].numel(), dtype=out[1].dtype).view(out[1].shape)).sin().sum()
        return torch.autograd.grad(loss, args)
    check(saved_view(MADE[made], SEEN[seen], READ[read]), lambda: [leaf(6, 6, dtype=torch.float64)], then=then, native="forward")


KRON = {
    "an argument": lambda x, y: (torch.kron(x, y),), "written before": lambda x, y: (x.data.mul_(.5), torch.kron(x, x))[1:], "a result": lambda x, y: (v := x.exp(), torch.kron(y, v)),
    "written in the program": lambda x, y: (torch.kron(v := x * x, y), v.mul_(2))[:1], "a view": lambda x, y: (v := x * x, torch.kron(v[1:], y)), "and the product written": lambda x, y: ((k := torch.kron(x, y)), k[1:], k.mul_(2))[:2],
    "of the same": lambda x, y: (v := x.sin(), torch.kron(v, v)),
}


@pytest.mark.parametrize("write", (data, numpy, counted))
@pytest.mark.parametrize("name", KRON)
def test_operands_of_kron(name, write):
    """It looks at their memory by tensors whose versions nobody counts: what was written since is read, and no error."""
    def then(out, args):
        write(args[0])
        if len(out) > 1:
            write(out[0])
        return torch.autograd.grad([t.sin().sum() for t in out], args, allow_unused=True)
    check(KRON[name], lambda: [leaf(2, 3, dtype=torch.float64), leaf(2, 3, seed=2, dtype=torch.float64)], then=then, native="forward")


SPREAD = {"max": torch.max, "min": torch.min, "median": torch.median, "nanmedian": torch.nanmedian, "prod": torch.prod, "prod of a dim": lambda x: x.prod(0)}


@pytest.mark.parametrize("shape", [(), (1,), (3,)], ids=str)
@pytest.mark.parametrize("again", [False, True], ids=["once", "create_graph"])
@pytest.mark.parametrize("name", SPREAD)
def test_what_is_chosen_of_one_element(name, again, shape):
    """That of no dims was spread by another formula, which gives NaN where nothing has the value that was chosen."""
    def f(x):
        v = SPREAD[name](x)
        x.data.mul_(0.5)
        return v
    check(f, lambda: [torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=torch.float64).view(shape).requires_grad_()], then=lambda out, args: [g.detach() for g in torch.autograd.grad(out.sum(), args, create_graph=again)], native="forward")
