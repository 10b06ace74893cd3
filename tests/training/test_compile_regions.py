"""vitrify.compile_regions: repeated blocks compiled in place, once for all that are alike."""
import copy
import gc
import types

import pytest
import torch
import vitrify
from torch import nn
from trainers import as_exact

pytestmark = pytest.mark.usefixtures("compiles")


class Block(nn.Module):
    def __init__(self, width, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, *widths, **more):
        super().__init__()
        self.blocks = nn.ModuleList([Block(w, **more) for w in widths])

    def forward(self, x):
        for b in self.blocks:
            x = b(x[..., : b.norm.normalized_shape[0]].contiguous())
        return x


class Since:
    def __init__(self):
        self.before = dict(vitrify.counters)

    def __getattr__(self, name):
        return vitrify.counters[name] - self.before[name]


def train(model, x):
    model.zero_grad()
    x = x.clone().requires_grad_()  # what a block gets from the one before needs gradients as well
    out = model(x)
    out.square().mean().backward()
    return {"out": out.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}


def infer(model, x):
    with torch.no_grad():
        return {"out": model(x)}


def run(widths, use, **more):
    """Three calls of a stack whose blocks are compiled, beside eager and fp64; what was counted."""
    torch.manual_seed(1)
    model = Stack(*widths, **more)
    twin, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x = torch.randn(6, 5, widths[0])
    since = Since()
    assert vitrify.compile_regions(model, classes=(Block,)) is model
    for _ in range(3):
        ours = use(model, x)
        counted = since.kernels_launched
    assert counted > 0
    as_exact(ours, use(twin, x), use(exact, x.double()))
    return types.SimpleNamespace(**{k: v - since.before[k] for k, v in vitrify.counters.items()})


@pytest.mark.parametrize("use", [train, infer])
def test_twelve_blocks_are_compiled_as_one(use):
    one = run([32], use)
    vitrify.reset()
    twelve = run([32] * 12, use)
    assert twelve.kernels_built == one.kernels_built > 0
    assert twelve.captures == 12 and one.captures == 1
    assert twelve.plans_shared >= 11


def test_blocks_of_other_sizes_have_plans_of_their_own():
    one = run([32], train)
    built = one.kernels_built
    vitrify.reset()
    mixed = run([32, 32, 24, 24, 24], train)
    assert mixed.plans_shared == 2 * 3  # forward and backward of the second block, the fourth and the fifth
    assert built < mixed.kernels_built <= 2 * built


def test_a_block_in_another_mode():
    torch.manual_seed(0)
    model = Stack(16, 16, 16, dropout=0.5)
    twin = copy.deepcopy(model)
    for m in model, twin:
        m.blocks[1].eval()
    vitrify.compile_regions(model, classes=Block)
    x = torch.randn(4, 16)
    for i in range(3):
        torch.manual_seed(i)
        ours = train(model, x)
        torch.manual_seed(i)
        torch.testing.assert_close(ours, train(twin, x))
    since = Since()
    for m in model, twin:
        m.eval()
    torch.testing.assert_close(train(model, x), train(twin, x))
    assert since.captures == 2  # the block that was in this mode is served as before


@pytest.mark.parametrize("use", [train, infer])
def test_a_parameter_replaced_or_written_afterwards(use):
    torch.manual_seed(0)
    model = Stack(32, 32, 32)
    vitrify.compile_regions(model, classes=(Block,))
    twin = Stack(32, 32, 32)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(64, 32)
    for change in (lambda b: None, lambda b: setattr(b.up, "weight", nn.Parameter(torch.ones(64, 32) * 0.01)), lambda b: b.down.weight.data.mul_(3),
                   lambda b: setattr(b.norm, "bias", nn.Parameter(torch.ones(32)))):
        for m in model, twin:
            change(m.blocks[1])
        for _ in range(2):
            torch.testing.assert_close(use(model, x), use(twin, x))


def test_constants_tell_blocks_apart():
    class Scaled(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.table = table

        def forward(self, x):
            return x * torch.tensor(self.table) + len(self.table)

    model = nn.Sequential(*[Scaled([1.0 * i, 2.0, 3.0]) for i in (1, 2, 2)])
    twin = copy.deepcopy(model)
    since = Since()
    vitrify.compile_regions(model, classes=(Scaled,))
    x = torch.randn(4, 3)
    torch.testing.assert_close(infer(model, x), infer(twin, x))
    assert since.plans_shared == 1


def test_a_plan_goes_with_its_last_block():
    for _ in range(2):
        model = vitrify.compile_regions(Stack(16), classes=(Block,))
        infer(model, torch.randn(2, 16))
        del model
        gc.collect()
    assert vitrify.counters["captures"] == 2 and vitrify.counters["plans_shared"] == 0


def test_bad_arguments():
    infer(vitrify.compile_regions(Stack(8), classes=(Block,)), torch.randn(2, 8))
    model = Stack(8)
    with pytest.raises(vitrify.OptionError, match="`model` takes a module, not function"):
        vitrify.compile_regions(infer, classes=(Block,))
    with pytest.raises(vitrify.OptionError, match="`classes`: Stack has no module of class Conv2d"):
        vitrify.compile_regions(model, classes=(Block, nn.Conv2d))
    with pytest.raises(vitrify.OptionError, match="`classes` takes module classes, not 'Block'"):
        vitrify.compile_regions(model, classes="Block")
    with pytest.raises(vitrify.OptionError, match="`classes` takes module classes, not <class 'int'>"):
        vitrify.compile_regions(model, classes=(int,))
    with pytest.raises(vitrify.OptionError, match="`classes`"):
        vitrify.compile_regions(model, classes=())
    with pytest.raises(vitrify.OptionError, match="unknown mode"):
        vitrify.compile_regions(model, classes=(Block,), mode="fast")
    assert not any(m._compiled_call_impl for m in model.modules())
