"""Grad modes inside a program, views and writes with gradients: capture.md, sections C and D, row by row."""
import gradients
import pytest
import torch
import vitrify
from beside import cases, program
from gradients import check, leaf, leaves, only

TWO = leaves((2, 3), (2, 3))
AWAY = dict(before=lambda *a: [t * 1 for t in a])  # arguments that are no leaves

# ---- no_grad, inference, detach, requires_grad_

MODES = [
    ("with torch.no_grad():\n        z = x * 2\n    return z * y, z", {}),
    ("with torch.no_grad():\n        z = x * 2\n        with torch.enable_grad():\n            w = x * y\n    return z + w", {}),
    ("with torch.set_grad_enabled(False):\n        m = x.mean()\n    return (x - m) * y", {}),
    ("return x.detach() * y + x * y.detach()", {}),
    ("z = (x * y).detach(); z.add_(1); return z * x", {}),
    ("z = x * y; d = z.detach(); return z, d", {}),
    ("z = x * y; return z.sin(), z.detach().cos()", {}),
    ("with torch.no_grad():\n        return x * y", {"native": "forward"}),
    ("z = x.clone(); z.requires_grad_(); return z * y", {}),
    ("z = x.detach().requires_grad_(); return z * y, (z * 2).detach()", {}),
    ("z = torch.ones(2, 3, requires_grad=True); return z * x", {}),
    ("z = (x * y).detach_(); return z * x", {}),
    ("w = torch.zeros_like(x); w.requires_grad_(False); return w + x * y", {}),
    ("return torch.is_grad_enabled(), x.requires_grad, x.is_leaf, (x * y).is_leaf, (x * y).requires_grad, x * y", {}),
    ("return x * y if (x * y).grad_fn is not None else x", {}),
    ("return x * y if torch.is_grad_enabled() else x", {}),
]


@cases(MODES)
def test_grad_modes(text, more):
    check(program(text), TWO, **more)


@pytest.mark.parametrize("text, reason", [("with torch.inference_mode():\n        z = x * 2\n    return x * y, z.shape", None), ("with torch.inference_mode():\n        z = x * 2\n    return z, y * 3", "both inference tensors and others"),
                                          ("with torch.inference_mode():\n        z = x * 2\n    return z * y", "")])
def test_inference_regions(text, reason):
    check(program(text), TWO, reason)


def test_a_new_leaf_as_result_runs_eagerly():
    check(program("return x.detach().requires_grad_(), x * y"), TWO, "returns a leaf")


def test_grad_of_a_result_inside_runs_eagerly():
    check(program("z = (x * y).sum(); z.backward(); return x * 2"), TWO, ".grad")


def test_autograd_grad_inside():
    check(program("z = (x.sin() * y).sum(); (g,) = torch.autograd.grad(z, x, retain_graph=True); return g, z"), TWO)


# ---- in place

WRITES = [
    ("x.mul_(y); return x", AWAY),
    ("x.mul_(y); return x.sin()", AWAY),
    ("x.mul_(2); return x * y", AWAY),
    ("x[0].mul_(2); return x * y", AWAY),
    ("x[:, 1] = y[:, 0]; return x * 2", AWAY),
    ("x.t()[0].add_(y[0, 0]); return x.sin(), y * 2", AWAY),
    ("x.add_(1); z = x * y; x.sub_(1); return z", {**AWAY, "eagerly": "modified by an inplace operation"}),
    ("x.copy_(y); return x * 2", AWAY),
    ("x.zero_(); return x + y", {**AWAY, "native": "forward"}),
    ("x.mul_(y); y.mul_(2); return x * 3", {**AWAY, "eagerly": "modified by an inplace operation"}),
    ("x.add_(y); y.mul_(2); return x * 3", AWAY),
    ("z = x * y; z.mul_(2); return z", {}),
    ("z = x * y; z[0] = 5; return z.sin()", {}),
    ("z = x * y; z[0] *= 2; z.t()[1] = x[0, :2]; return z, z.exp()", {}),
    ("z = x.clone(); z[:, 0] = y[:, 1]; return z * z", {}),
    ("z = x.clone(); v = z[0]; v.mul_(y[0]); return z, v", {}),
    ("z = x.clone(); a, b = z[0], z[1]; a.mul_(2); b.copy_(a); return z", {}),
    ("z = torch.zeros(2, 3); z[0] = x[0]; z[1] = y[1] * 2; return z", {}),
    ("z = torch.zeros(2, 3); z.index_put_((torch.tensor([0]),), y[:1]); z.scatter_add_(0, torch.tensor([[1, 1, 0]]), x[:1]); return z", {}),
    ("z = x * 2; z.mul_(y.detach()); z.relu_(); return F.dropout(z, 0.0, inplace=True) + y", {}),
    ("z = (x * y).masked_fill_(x > 1, 0.0); z[y > 1] = 3; return z", {}),
    ("z = x * y\n    with torch.no_grad():\n        z.zero_()\n    return z + x", {}),
    ("z = x * y; z.data.add_(1); return z * 2", {}),
    ("z = x.clone(); z.detach().mul_(2); return z * y", {}),
    ("z = x.clone().unsqueeze_(0).squeeze_(0).t_(); return z, z * 2", {}),
    ("z = x.exp(); z.add_(1); return z", {}),  # its backward raises, as eager's: exp saved its result
    ("z = x.sin(); w = z * y; z.add_(1); return w", {}),  # as well
    ("z = x * 2; w = z + y; z.add_(1); return w, z", {}),
]


@cases(WRITES)
def test_writes(text, more):
    check(program(text), TWO, more.get("eagerly"), before=more.get("before"), native=more.get("native", "both"))


def test_a_backward_that_raises_gives_no_gradients():
    """Eager has come to some of them by then, in its order; ours raises before it begins (docs/training.md)."""
    fn, told = program("z = x * 2; z.relu_(); z.clamp_(max=2); return F.dropout(z, 0.0, inplace=True) * y"), []
    for f in (fn, vitrify.compile(fn)):
        x, y = TWO()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            f(x, y).sum().backward()
        told.append((str(error.value), x.grad, y.grad is not None))
    assert told[0][0] == told[1][0] and told[0][1:] == (None, True) and told[1][1:] == (None, False)


@pytest.mark.parametrize("text", ["x.mul_(2); return x", "x.add_(y); return y * 2", "x[0] = 1; return x * y", "x.zero_(); return y"])
def test_a_leaf_is_not_written(text):
    check(program(text), TWO, "", calls=1)


@pytest.mark.parametrize("text", ["x.mul_(2); return x * y", "x[0] = 1; return x * y", "x.copy_(y.detach()); return x * y", "x.add_(1); x.mul_(3); return (x * y).sum(0)", "x.zero_(); return y * 2"])
def test_an_input_without_gradients_is_written(text):
    check(program(text), lambda: [leaf(2, 3, grad=False), leaf(2, 3, seed=2)], native="forward")


def test_a_buffer_is_written_and_read():
    class Ema(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return (x - self.mean) ** 2
    a, b = Ema(), Ema()
    t = vitrify.compile(a)
    for i in range(4):
        x, y = leaf(4, 3, seed=i), leaf(4, 3, seed=i)
        t(x).sum().backward()
        b(y).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        torch.testing.assert_close(a.mean, b.mean)
        assert a.mean._version == b.mean._version
    assert vitrify.counters["compiled_calls"] == 8


# ---- the table of capture.md, section D: (program, what is done to the results afterwards)

def also(text):
    def then(out, args):
        exec(text, {"x": args[0], "y": args[1] if len(args) > 1 else None, "out": out, "torch": torch})
        gradients.backward(out, args)
    return then


ONE = leaves((2, 3), (2, 3))
# Why rows run eagerly; "": eager raises.
REFUSED = {"P14": "gradients must follow", "P15": "set_", "P19": "modified by an inplace operation", "P13": "", "A6 expanded": "", "A6 overlapping": ""}
NATIVE = {"P7": "none", "P7 and a write": "none",  # only views are made
          **dict.fromkeys(("P21", "P21 no leaf", "P21 no leaf and a write"), "forward")}  # gradients are the tangents
TABLE = {
    "P1": ("v = x[0]; v.mul_(2); return v", AWAY, None),
    "P1 and a write": ("v = x[0]; v.mul_(2); return v", AWAY, "out.add_(1)"),
    "P4": ("d = x.detach(); z = x * 2; d.add_(5); return z, x.detach()", AWAY, None),
    "P4 leaf": ("d = x.detach(); z = x * 2; d.add_(5); return z, x.detach()", {}, None),
    "P5": ("x.data.add_(1); return x * 2", AWAY, None),
    "P5 leaf": ("x.data.add_(1); return x * 2", {}, None),
    "P6": ("z = x * 2; return z, z[0], z.t()", {}, None),
    "P6 and a write": ("z = x * 2; return z, z[0], z.t()", {}, "out[1].mul_(3)"),
    "P6 and a write to the base": ("z = x * 2; return z, z[0], z.t()", {}, "out[0].mul_(out[0].detach())"),
    "P6 views only": ("z = x * 2; return z[0], z.t()", {}, None),
    "P6 views only and a write": ("z = x * 2; return z[0], z.t()", {}, "out[0].mul_(3)"),
    "P7": ("return x.unbind(0)", {}, None),
    "P7 and a write": ("return x.unbind(0)", AWAY, "out[0].add_(1)"),
    "P7 of a result": ("return (x * 2).unbind(0)", {}, None),
    "P7 of a result and a write": ("return (x * 2).unbind(0)", {}, "out[0].add_(1)"),
    "P7 split and chunk": ("z = x * y; return z.split(1), z.chunk(3, 1)", {}, None),
    "P8": ("with torch.no_grad():\n        v = x[0]\n    return v, x * 2", AWAY, None),
    "P8 and a write": ("with torch.no_grad():\n        v = x[0]\n    return v, x * 2", AWAY, "out[0].add_(1)"),
    "P8 leaf and a write": ("with torch.no_grad():\n        v = x[0]\n    return v, x * 2", {}, "out[0].add_(1)"),
    "P8 of a result": ("z = x * 2\n    with torch.no_grad():\n        v = z[0]\n    return v, z", {}, None),
    "P8 of a result and a write": ("z = x * 2\n    with torch.no_grad():\n        v = z[0]\n    return v, z", {}, "out[0].add_(1)"),
    "P11": ("return x.as_strided((2, 2), (3, 1), 1) * 2", {}, None),
    "P13": ("z = x * 2; z.resize_(3, 2); return z", {}, None),
    "P14": ("x.t_(); x.unsqueeze_(0); return x * 2", AWAY, None),
    "P15": ("z = x.detach().clone(); z.set_(y.detach()); return z * x", {}, None),
    "P16": ("x.copy_(torch.arange(3.0)); return x * 2", AWAY, None),
    "P17": ("x.mul_(y); return x + 1", {"make": lambda: [leaf(2, 3, grad=False), leaf(2, 3, seed=2)]}, None),
    "P18": ("x[0].mul_(y[0]); return x + 1", {"make": lambda: [leaf(2, 3, grad=False), leaf(2, 3, seed=2)]}, None),
    "P18 of a view": ("x.mul_(y); return x + 1", {"make": lambda: [leaf(4, 3, grad=False), leaf(2, 3, seed=2)], "before": lambda x, y: [x[1:3], y]}, None),
    "P19": ("x.add_(1e8); z = x * y; x.sub_(1e8); return z", AWAY, None),
    "P21": ("return x, x[:], x.detach(), x.contiguous(), x.to(x.dtype), x.view_as(x), x + 1", {}, None),
    "P21 no leaf": ("return x, x[:], x.detach(), x.contiguous(), x.to(x.dtype), x + 1", AWAY, None),
    "P21 no leaf and a write": ("return x, x[:], x.detach(), x + 1", AWAY, "out[1].mul_(2)"),
    "C11": ("x.mul_(y); return x.sin()", {"make": leaves((4, 3), (2, 3)), "before": lambda x, y: [(x * 1)[1:3], y]}, None),
    "A6 expanded": ("z = (x * y)[0].expand(4, 3); z.add_(1); return z", {}, None),
    "A6 overlapping": ("z = (x * y).view(-1); z[1:].copy_(z[:-1]); return z", {}, None),
}


@pytest.mark.parametrize("row", TABLE)
def test_table(row):
    text, more, change = TABLE[row]
    check(program(text), more.get("make", ONE), REFUSED.get(row), then=also(change) if change else gradients.backward, before=more.get("before"), native=NATIVE.get(row, "both"))


def overlapping(kind):
    def before(x, *_):
        base = x * 1
        return [base, base.t()] if kind == "transpose" else [base[:2], base[1:]]
    return before


@pytest.mark.parametrize("kind", ["transpose", "slices"])
@pytest.mark.parametrize("text", ["return (x * 2).sum() + (y * 3).sum()", "x.add_(1); return (x * 2).sum() + (y * 3).sum()", "x.add_(1); y.mul_(2); return x.sum()"])
def test_inputs_that_share_memory(text, kind):
    """P2 and P3: read compiled; written eagerly with one warning."""
    check(program(text), leaves((3, 3)), None if "_(" not in text else "shares memory", before=overlapping(kind))


def test_results_of_some_views():
    check(program("z = x * 2; return z[0], z.t(), z"), TWO, then=only(0, 1))
    check(program("z = x * y; return z[0], z[1]"), TWO, then=only(1), native="forward")
    check(program("z = x * y; return z.view(-1), z.t()"), TWO, then=only(0), native="forward")
