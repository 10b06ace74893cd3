"""vitrify.compile(optimizer.step) beside eager: parameters and state, learning rates that change, what is skipped and what is refused."""
import copy
import math
import warnings

import pytest
import torch
import vitrify
from torch import nn, optim
from trainers import Net, compare

# The first call makes the optimizer's state, or the gradients.
pytestmark = pytest.mark.eager("it writes Python state, as caches do at first", "it makes gradients that are there from the first call on", some=True)

OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.05),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "SGD dampening": lambda p: optim.SGD(p, lr=0.05, momentum=0.8, dampening=0.3, maximize=True),
    "SGD foreach": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, foreach=True),
    "Adam": lambda p: optim.Adam(p, lr=1e-2),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.02),
    "AdamW": lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=5e-2, lr_decay=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "Adadelta": lambda p: optim.Adadelta(p),
}


class Lion(optim.Optimizer):
    """As users write them."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                b1, b2 = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].mul(b1).add_(p.grad, alpha=1 - b1).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(b2).add_(p.grad, alpha=1 - b2)


def ran_native(counted, recompiles=0, eager=2):
    assert counted["fallbacks"] == 0 and counted["kernels_launched"] > 0, counted
    assert counted["recompiles"] <= recompiles and counted["eager_calls"] <= eager, counted
    assert counted["externs_called"] == 0, counted


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_eager(name):
    # RAdam takes another way from its sixth step on
    ran_native(compare(OPTIMIZERS[name], whole=False), recompiles=1 if name == "RAdam" else 0)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("more", [{}, dict(foreach=True), dict(weight_decay=0.1, d=2.0, maximize=True), dict(lr=0.5)], ids=str)
def test_norms_read_in_python(more, whole):
    """Adafactor computes with item() of norms. Its lerp takes another form once weights are below a half, in the third step."""
    counted = compare(lambda p: optim.Adafactor(p, **{"lr": 1e-2, **more}), whole=whole)
    assert counted["fallbacks"] == 0 and counted["kernels_launched"] > 0 and counted["compiled_calls"] >= 17, counted
    assert counted["recompiles"] <= 1, counted


def test_an_optimizer_of_the_users():
    ran_native(compare(lambda p: Lion(p, weight_decay=0.1), whole=False))


SCHEDULES = {
    "step": lambda o: optim.lr_scheduler.StepLR(o, 3, 0.5),
    "cosine": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "lambda": lambda o: optim.lr_scheduler.LambdaLR(o, lambda i: 1 / math.sqrt(i + 1)),
    "warm up": lambda o: optim.lr_scheduler.LinearLR(o, 0.1, total_iters=7),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("optimizer", ["SGD momentum", "AdamW"])
def test_schedulers_do_not_recompile(optimizer, name):
    ran_native(compare(OPTIMIZERS[optimizer], whole=False, schedule=SCHEDULES[name]))


def test_floats_other_than_the_learning_rate_recompile_once():
    def schedule(o):
        return optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=25)  # moves the momentum as well

    ran_native(compare(OPTIMIZERS["SGD momentum"], whole=False, schedule=schedule), recompiles=1)
    ran_native(compare(OPTIMIZERS["AdamW"], whole=False, schedule=schedule), recompiles=1)


def test_learning_rates_in_tensors():
    def lr(i, model, optimizer):
        optimizer.param_groups[0]["lr"].fill_(0.05 / (i + 1))

    ran_native(compare(lambda p: optim.SGD(p, lr=torch.tensor(0.05), momentum=0.9), whole=False, use=lr))
    ran_native(compare(lambda p: optim.AdamW(p, lr=torch.tensor(0.01)), whole=False, use=lr))


def make(optimizer, dtype=torch.float32):
    torch.manual_seed(0)
    model = Net().to(dtype)
    opt = optimizer(model.parameters())
    return model, opt


def grads_for(model, i):
    torch.manual_seed(100 + i)
    for p in model.parameters():
        p.grad = torch.randn_like(p)


def run_beside(optimizer, do, steps=6):
    """The same steps eagerly and compiled; `do(i, model, optimizer)` before each."""
    before, models = dict(vitrify.counters), []
    for compiled in (False, True):
        model, opt = make(optimizer)
        step = vitrify.compile(opt.step) if compiled else opt.step
        for i in range(steps):
            grads_for(model, i)
            do(i, model, opt)
            step()
        models.append((model, opt))
    for a, b in zip(models[0][0].parameters(), models[1][0].parameters()):
        torch.testing.assert_close(b, a, rtol=2e-6, atol=2e-7)
    return {k: v - before[k] for k, v in vitrify.counters.items()}, models[1]


def test_parameters_without_a_gradient_are_skipped():
    def do(i, model, opt):
        if i >= 3:
            model.n.weight.grad = None

    counted, _ = run_beside(OPTIMIZERS["AdamW"], do, 8)
    ran_native(counted, recompiles=1)


def test_groups_have_rates_of_their_own():
    def groups(params):
        params = list(params)
        return optim.AdamW([{"params": params[:2], "lr": 1e-2}, {"params": params[2:], "weight_decay": 0.3}], lr=1e-3)

    def do(i, model, opt):
        opt.param_groups[i % 2]["lr"] *= 0.9

    counted, _ = run_beside(groups, do)
    ran_native(counted)


def test_a_group_that_is_added_is_seen():
    extra = []

    def do(i, model, opt):
        if i == 3:
            torch.manual_seed(1)
            extra.append(nn.Parameter(torch.randn(5)))
            opt.add_param_group({"params": [extra[-1]]})
        if i >= 3:
            extra[-1].grad = torch.full((5,), float(i))

    counted, _ = run_beside(OPTIMIZERS["SGD"], do, 6)
    torch.testing.assert_close(extra[0], extra[1])
    ran_native(counted, recompiles=1)


def test_state_is_saved_and_loaded():
    saved = {}

    def do(i, model, opt):
        if i == 2:
            saved["state"] = copy.deepcopy(opt.state_dict())
        if i == 5:
            opt.load_state_dict(saved["state"])

    counted, (model, opt) = run_beside(OPTIMIZERS["AdamW"], do, 8)
    ran_native(counted, recompiles=1)
    assert {v["step"].item() for v in opt.state.values()} == {5.0}


def test_gradients_of_another_layout_are_seen():
    def do(i, model, opt):
        if i % 2:
            model.a.weight.grad = model.a.weight.grad.t().contiguous().t()

    counted, _ = run_beside(OPTIMIZERS["AdamW"], do, 8)
    ran_native(counted, recompiles=1)


def test_gradients_are_not_kept_alive():
    import weakref

    model, opt = make(OPTIMIZERS["AdamW"])
    step = vitrify.compile(opt.step)
    for i in range(4):
        grads_for(model, i)
        step()
    alive = [weakref.ref(p.grad) for p in model.parameters()]
    opt.zero_grad()
    assert not any(r() is not None for r in alive)


def test_many_parameters_are_few_kernels():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(30 + i % 7, 11)) for i in range(100)]
    opt = optim.AdamW(params, lr=1e-3)
    step = vitrify.compile(opt.step)
    for i in range(4):
        for p in params:
            p.grad = torch.randn_like(p)
        before = dict(vitrify.counters)
        step()
    assert vitrify.counters["compiled_calls"] > before["compiled_calls"]
    assert vitrify.counters["kernels_launched"] - before["kernels_launched"] <= 45  # of 200 updates, in seven sizes
    assert vitrify.counters["externs_called"] == before["externs_called"]


def test_versions_count_as_in_eager():
    counts = []
    for compiled in (False, True):
        model, opt = make(OPTIMIZERS["AdamW"])
        step = vitrify.compile(opt.step) if compiled else opt.step
        for i in range(4):
            grads_for(model, i)
            step()
        counts.append([p._version for p in model.parameters()] + [s._version for v in opt.state.values() for s in v.values()])
    assert counts[0] == counts[1]


@pytest.mark.eager("it writes Python state on every call: seen")
def test_hooks_of_the_optimizer_run_or_say_why_not():
    model, opt = make(OPTIMIZERS["SGD"])
    seen = []
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append(len(seen)))
    step = vitrify.compile(opt.step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vitrify.VitrifyWarning)
        for i in range(5):
            grads_for(model, i)
            step()
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.eager("it writes Python state on every call: seen")
def test_a_hook_that_is_registered_later_runs():
    model, opt = make(OPTIMIZERS["SGD"])
    step, seen = vitrify.compile(opt.step), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vitrify.VitrifyWarning)
        for i in range(6):
            if i == 3:
                opt.register_step_pre_hook(lambda o, args, kwargs: seen.append(i))
            grads_for(model, i)
            step()
    assert seen == [3, 4, 5]


@pytest.mark.eager("reads a tensor's value: aten::item")
def test_closures_run_eagerly_and_say_so():
    model, opt = make(lambda p: optim.LBFGS(p, lr=0.1, max_iter=3))
    x = torch.randn(5, 12)

    def closure():
        opt.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    step = vitrify.compile(opt.step)
    with pytest.warns(vitrify.VitrifyWarning, match="runs eagerly"):
        losses = [float(step(closure)) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_a_scheduler_made_before_the_compile():
    model, opt = make(OPTIMIZERS["AdamW"])
    scheduler = optim.lr_scheduler.ExponentialLR(opt, 0.9)
    step, before = vitrify.compile(opt.step), dict(vitrify.counters)
    for i in range(6):
        grads_for(model, i)
        step()
        scheduler.step()
    ran_native({k: v - before[k] for k, v in vitrify.counters.items()})


@pytest.mark.no_kernels("the step raises")
def test_a_step_that_fails_leaves_everything_as_it_was():
    class Bad(Lion):
        @torch.no_grad()
        def step(self):
            super().step()
            raise ValueError("on purpose")

    model, opt = make(lambda p: Bad(p))
    grads_for(model, 0)
    grads = [p.grad for p in model.parameters()]
    with pytest.raises(ValueError, match="on purpose"):
        vitrify.compile(opt.step)()
    assert all(p.grad is g for p, g in zip(model.parameters(), grads)) and type(opt.param_groups[0]["lr"]) is float
