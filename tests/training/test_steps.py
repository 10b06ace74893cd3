"""Whole training steps in one compiled call: forward, loss, backward, clipping, update."""
import gc
import warnings

import bounds
import pytest
import torch
import vitrify
from test_optimizers import OPTIMIZERS, SCHEDULES, Lion
from torch import nn, optim
from torch.utils.checkpoint import checkpoint
from trainers import Net, batch, compare

# The first call makes the optimizer's state, or the gradients.
pytestmark = pytest.mark.eager("it writes Python state, as caches do at first", "it makes gradients that are there from the first call on", some=True)


def ran(counted, eager=2, recompiles=0):
    assert counted["fallbacks"] == 0 and counted["kernels_launched"] > 0, counted
    assert counted["eager_calls"] <= eager and counted["recompiles"] <= recompiles, counted


@pytest.mark.parametrize("name", ["SGD", "SGD momentum", "Adam", "AdamW", "RMSprop", "AdamW foreach"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_as_eager(name, set_to_none):
    ran(compare(OPTIMIZERS[name], whole=True, set_to_none=set_to_none))


def test_an_optimizer_of_the_users():
    ran(compare(lambda p: Lion(p, weight_decay=0.1), whole=True))


@pytest.mark.parametrize("clip", [
    lambda p: nn.utils.clip_grad_norm_(p, 0.5),
    lambda p: nn.utils.clip_grad_norm_(p, 0.5, foreach=True),
    lambda p: nn.utils.clip_grad_value_(p, 0.01),
], ids=["norm", "norm foreach", "value"])
def test_clipping(clip):
    ran(compare(OPTIMIZERS["SGD momentum"], whole=True, clip=clip))


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_do_not_recompile(name):
    ran(compare(OPTIMIZERS["AdamW"], whole=True, schedule=SCHEDULES[name]))


def steps(step, n=5):
    return [step(*batch(i, torch.float32)) for i in range(n)]


def both(make_step, n=5):
    """make_step() gives (model, step); the same steps eagerly and compiled."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model, step = make_step()
        before = dict(vitrify.counters)
        out = steps(vitrify.compile(step) if compiled else step, n)
        results.append((model, out))
        counted = {k: v - before[k] for k, v in vitrify.counters.items()}
    (a, out_a), (b, out_b) = results
    for x, y in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(y, x, rtol=2e-6, atol=2e-7)
        assert (x.grad is None) == (y.grad is None)
        if x.grad is not None:
            torch.testing.assert_close(y.grad, x.grad, **bounds.STEP_GRADIENTS)
            assert x.grad.stride() == y.grad.stride() and x.grad.requires_grad == y.grad.requires_grad
    return counted, (a, out_a), (b, out_b)


def test_gradients_are_left_as_eager_leaves_them():
    def make():
        model = Net()
        opt = optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        return model, step

    counted, _, (model, _) = both(make)
    ran(counted)
    assert len({p.grad.data_ptr() for p in model.parameters()}) == len(list(model.parameters()))


def test_gradients_are_new_tensors_each_call():
    model = Net()

    @vitrify.compile
    def step(x, y):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()

    seen = []
    for i in range(4):
        step(*batch(i, torch.float32))
        seen.append(model.a.weight.grad)
    values = [g.clone() for g in seen]
    assert len({id(g) for g in seen}) == 4
    step(*batch(9, torch.float32))
    assert all(torch.equal(a, b) for a, b in zip(seen, values))


def test_gradients_accumulate():
    def make():
        model = Net()

        def step(x, y):
            nn.functional.cross_entropy(model(x), y).backward()

        return model, step

    counted, _, _ = both(make)
    ran(counted)


def test_none_at_the_end():
    def make():
        model = Net()
        opt = optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        return model, step

    counted, _, (model, _) = both(make)
    ran(counted, eager=0)
    assert all(p.grad is None for p in model.parameters())


def test_an_average_of_the_weights_in_the_step():
    averages = []

    def make():
        model = Net()
        opt = optim.AdamW(model.parameters(), lr=1e-2)
        average = [p.detach().clone() for p in model.parameters()]
        averages.append(average)

        def step(x, y):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            with torch.no_grad():
                for a, p in zip(average, model.parameters()):
                    a.lerp_(p, 0.1)
            return loss

        return model, step

    counted, _, _ = both(make)
    ran(counted)
    for a, b in zip(*averages):
        torch.testing.assert_close(b, a, rtol=2e-6, atol=2e-7)


def test_the_loss_says_its_graph_is_gone():
    model = Net()

    @vitrify.compile
    def step(x, y):
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for loss in steps(step, 3):
        assert loss.requires_grad and loss.grad_fn is not None
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()


def test_gradients_of_an_argument():
    def step(x, w):
        (x * w).sum().backward()

    compiled = vitrify.compile(step)
    for i in range(4):
        x = torch.randn(5)
        a, b = (torch.arange(5.0).requires_grad_() for _ in range(2))
        if i == 3:
            a.grad, b.grad = torch.ones(5), torch.ones(5)
        step(x, a)
        compiled(x, b)
        torch.testing.assert_close(b.grad, a.grad)
    assert vitrify.counters["compiled_calls"] >= 2 and vitrify.counters["fallbacks"] == 0


@pytest.mark.eager("hooks of model.a.weight see gradients")
def test_hooks_of_parameters_run():
    model, seen = Net(), []
    model.a.weight.register_hook(lambda g: seen.append(g.shape))

    @vitrify.compile
    def step(x, y):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vitrify.VitrifyWarning)
        steps(step, 4)
    assert len(seen) == 4 and all(type(g) is torch.Size for g in seen)


@pytest.mark.eager("hooks of what it reaches see gradients")
def test_a_hook_registered_later_runs():
    model, seen = Net(), []

    @vitrify.compile
    def step(x, y):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()

    steps(step, 3)
    model.a.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vitrify.VitrifyWarning)
        steps(step, 2)
    assert len(seen) == 2 and not any(vitrify._C.is_fake(s) for s in seen)


@pytest.mark.eager("reads a tensor's value: aten::item")
def test_a_failed_step_puts_gradients_back():
    model = Net()
    model.zero_grad()
    nn.functional.cross_entropy(model(batch(0, torch.float32)[0]), batch(0, torch.float32)[1]).backward()
    grads = [p.grad for p in model.parameters()]
    raising = True

    @vitrify.compile
    def step(x, y):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        return float(model.a.weight.grad.sum())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vitrify.VitrifyWarning)
        value = step(*batch(1, torch.float32))
    assert raising and isinstance(value, float)
    assert not any(vitrify._C.is_fake(p.grad) for p in model.parameters())
    assert all(p.grad is not g for p, g in zip(model.parameters(), grads))


def test_memory_is_flat():
    model = Net()
    opt = optim.AdamW(model.parameters())

    @vitrify.compile
    def step(x, y):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        return loss

    steps(step, 4)
    gc.collect()
    count = lambda: sum(isinstance(o, torch.Tensor) for o in gc.get_objects())  # noqa: E731
    before = count()
    steps(step, 30)
    gc.collect()
    assert count() <= before + 2


def test_updates_written_out():
    def make():
        model = Net()

        def step(x, y):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
            return loss

        return model, step

    counted, _, (_, losses) = both(make)
    ran(counted, eager=0)
    assert all(loss.requires_grad for loss in losses)


def test_gradients_asked_for():
    def make():
        model = Net()

        def step(x, y):
            loss = nn.functional.cross_entropy(model(x), y)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads):
                    p.sub_(g, alpha=0.1)
            return loss

        return model, step

    counted, _, _ = both(make)
    ran(counted, eager=0)


def test_several_backwards_and_optimizers():
    def make():
        one, two = Net(), Net()
        opts = [optim.Adam(m.parameters(), lr=1e-3) for m in (one, two)]

        def step(x, y):
            opts[0].zero_grad()
            for a, b in zip(x.split(3), y.split(3)):
                (nn.functional.cross_entropy(one(a), b) / 3).backward()
            opts[0].step()
            opts[1].zero_grad()
            loss = (two(x) - one(x).detach()).pow(2).mean()
            loss.backward(retain_graph=True)
            opts[1].step()
            return loss.detach()

        return nn.ModuleList([one, two]), step

    counted, _, _ = both(make)
    ran(counted)


def eager_with(make_step, reason):
    with pytest.warns(vitrify.VitrifyWarning, match=reason):
        counted, _, _ = both(make_step)
    assert counted["compiled_calls"] == 0


@pytest.mark.eager("it writes Python state on every call")
def test_a_scheduler_in_the_step_counts_once_a_step():
    schedulers = []

    def make():
        model = Net()
        opt = optim.SGD(model.parameters(), lr=0.1)
        schedulers.append(optim.lr_scheduler.StepLR(opt, 2, 0.5))

        def step(x, y, scheduler=schedulers[-1]):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
            scheduler.step()

        return model, step

    eager_with(make, "writes Python state on every call")
    assert schedulers[0].last_epoch == schedulers[1].last_epoch == 5
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()


@pytest.mark.eager("reads a tensor's value: aten::item")
def test_a_scaler_runs_eagerly():
    def make():
        model, scaler = Net(), torch.amp.GradScaler("cpu")
        opt = optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            opt.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            scaler.step(opt)
            scaler.update()

        return model, step

    eager_with(make, "runs eagerly")


@pytest.mark.eager("reads a tensor's value: aten::item")
def test_a_number_read_in_python_runs_eagerly():
    def make():
        model = Net()
        opt = optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss.item()

        return model, step

    eager_with(make, "reads a tensor's value: aten::item")


def test_statistics_and_draws_are_eagers():
    def make():
        model = nn.Sequential(nn.Linear(12, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 7))
        opt = optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            return loss

        return model, step

    counted, (a, _), (b, _) = both(make)
    ran(counted)
    for x, y in zip(a.buffers(), b.buffers()):
        torch.testing.assert_close(y, x, **bounds.SMALL_SUMS)


def test_checkpoints_draw_the_same_numbers_again():
    def make():
        torch.manual_seed(1)
        block = nn.Sequential(nn.Linear(12, 24), nn.Dropout(0.4), nn.GELU(), nn.Linear(24, 12), nn.Dropout(0.2))
        model = nn.Sequential(nn.Linear(12, 12), block, nn.Linear(12, 7))
        opt = optim.SGD(model.parameters(), lr=0.1)

        def step(x, y):
            opt.zero_grad()
            h = checkpoint(block, model[0](x), use_reentrant=False)
            loss = nn.functional.cross_entropy(nn.functional.dropout(model[2](h), 0.1), y)
            loss.backward()
            opt.step()
            return loss

        return model, step

    counted, _, _ = both(make)
    assert counted["eager_calls"] <= 2 and counted["compiled_calls"] > 0 and counted["kernels_launched"] > 0, counted
