"""The judge: whatever eager promises and a call breaks is found, each thing alone; and a program counts as compiled only where the engine has said so."""
import collections
import contextlib
import dataclasses
import re
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import vitrify

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
import bounds  # noqa: E402
import calls  # noqa: E402
import compare  # noqa: E402
import oracle  # noqa: E402
import program  # noqa: E402
import values  # noqa: E402
from compare import Mismatch, flat  # noqa: E402

pytestmark = pytest.mark.no_kernels("the judge is judged: nothing is compiled")


def outcome(out, args=(), held=(), error=None, **more):
    leaves = flat((out, ())) + flat(tuple(args), "in")
    return calls.Outcome(**{"error": error, "leaves": leaves, "out": (out, ()), "args": tuple(args), "held": [tuple(args), list(held)], "bumps": [0] * len(args),
                            "states": [torch.zeros(2), torch.zeros(2)], "did": {}} | more)


def equal_values(index, place, ours, eager):
    assert torch.equal(ours.detach(), eager.detach()), place


def differ(ours, eager):
    oracle.same_call("call", eager, eager, equal_values)
    with pytest.raises(Mismatch) as wrong:
        oracle.same_call("call", ours, eager, equal_values)
    return str(wrong.value)


Pair = collections.namedtuple("Pair", "a b")
X = torch.zeros(2, 3)
MEMORY = torch.zeros(12)


@pytest.mark.parametrize("ours, eager, says", [
    (lambda x: [x + 1], lambda x: (x + 1,), "structure"),
    (lambda x: Pair(x + 1, 2), lambda x: (x + 1, 2), "structure"),
    (lambda x: {"b": 1, "a": 2}, lambda x: {"a": 2, "b": 1}, "structure"),
    (lambda x: x + 1, lambda x: (x + 1,), "structure"),
    (lambda x: None, lambda x: x + 1, "None"),
    (lambda x: 1, lambda x: 1.0, "1"),
    (lambda x: True, lambda x: 1, "True"),
    (lambda x: x.clone(), lambda x: x, "aliasing"),
    (lambda x: x.clone(), lambda x: x.view(2, 3), "aliasing"),
    (lambda x: x.view(2, 3), lambda x: x, "aliasing"),
    (lambda x: x[:0].clone(), lambda x: x[:0, :1], "shape"),
    (lambda x: (x + 1, x + 1), lambda x: (x + 1,) * 2, "aliasing"),
    (lambda x: (MEMORY[:2], MEMORY[2:4]), lambda x: (MEMORY[:2], MEMORY[4:6]), "aliasing"),
    (lambda x: x.double(), lambda x: x.clone(), "dtype"),
    (lambda x: x.t().clone(memory_format=torch.contiguous_format).t(), lambda x: x.clone(), "strides"),
    (lambda x: x.clone().as_strided((2, 1), (1, 1)), lambda x: x.clone().as_strided((2, 1), (1, 2)), "strides"),
    (lambda x: torch.complex(x, x).conj().imag, lambda x: -x, "strides|neg bit"),
    (lambda x: torch.complex(x, x).conj(), lambda x: torch.complex(x, x), "conj"),
    (lambda x: x.clone().requires_grad_(), lambda x: x.clone(), "requires_grad"),
    (lambda x: x.clone().requires_grad_(), lambda x: x.clone().requires_grad_() * 1, "grad_fn"),
    (lambda x: torch.nn.Parameter(x.clone()), lambda x: x.clone().requires_grad_(), "type"),
    (lambda x: torch.inference_mode()(torch.zeros)(2, 3), lambda x: x.clone(), "inference"),
    (lambda x: x.to_sparse(), lambda x: x.clone(), "layout"),
], ids=["a list", "a named tuple", "order of a dict", "no tuple", "None", "an int", "a bool", "a copy of an argument", "a copy of a view", "a view of an argument", "sizes of nothing", "two for one", "where in memory", "dtype", "strides", "strides of one element", "negative bit", "conjugate bit", "requires_grad", "grad_fn", "a Parameter", "inference", "layout"])
def test_results(ours, eager, says):
    text = differ(outcome(ours(X), (X,)), outcome(eager(X), (X,)))
    assert re.search(says, text), text


ONES = [  # a shape, two of its layouts, whether an op can tell them apart
    ((7, 1, 3), (3, 3, 1), (3, 1, 1), False),
    ((1, 7, 16, 3), (336, 48, 3, 1), (48, 48, 3, 1), False),
    ((8, 8, 1, 1), (8, 1, 1, 8), (8, 1, 1, 1), False),
    ((8, 8, 1, 1), (8, 1, 8, 8), (8, 1, 1, 1), True),  # channels last, to a convolution
    ((1, 4, 6, 1), (1, 1, 4, 24), (24, 1, 4, 4), True),
    ((1, 4, 2, 6, 1), (48, 1, 24, 4, 4), (1, 1, 24, 4, 48), True),
    ((4, 1, 2), (2, 2, 1), (4, 2, 2), True),
    ((0, 1), (1, 1), (5, 1), True),
]


@pytest.mark.parametrize("shape, ours, eager, says", ONES, ids=str)
def test_strides_of_one_element(shape, ours, eager, says):
    """They are compared in gradients where an op can tell, and in results always."""
    a, b = (torch.empty_strided(shape, s).fill_(1) for s in (ours, eager))
    for first, second in ((a, b), (b, a)):
        with pytest.raises(Mismatch, match="strides") if says else contextlib.nullcontext():
            compare.check_meta("gradient", first, second, of_gradient=True)
        compare.check_meta("gradient", first, second, of_gradient=True, anywhere=True)
        for anywhere in (False, True):
            with pytest.raises(Mismatch, match="strides"):
                compare.check_meta("result", first, second, anywhere=anywhere)


@pytest.mark.parametrize("path", ["grad of in[0]", "grad of net.weight", "out[1][0]", "out[0]", "in[0]", "net.weight"])
def test_whose_strides_of_one_element(path):
    a, b = (torch.ones(7, 1).as_strided((7, 1), s) for s in ((1, 1), (1, 7)))
    ours, eager = (dataclasses.replace(outcome(X, (X,)), leaves=[(path, t)]) for t in (a, b))
    with contextlib.nullcontext() if path.startswith(("grad", "out[1]")) else pytest.raises(Mismatch, match="strides"):
        oracle.same_call("call", ours, eager, equal_values)


def test_bugs_of_torch_say_nothing(monkeypatch):
    broken = dataclasses.replace(outcome((), (X,)), error=RuntimeError("x INTERNAL ASSERT FAILED at y"))
    monkeypatch.setattr(oracle.Side, "make", lambda self, *_: broken)
    p = program.Program(7, 1, theme="classic")
    assert oracle.check(p, oracle.Reference(p))["kind"] == "inconclusive"


def test_what_a_call_leaves():
    good = outcome(X + 1, (X,))
    change = lambda **more: dataclasses.replace(good, **more)  # noqa: E731
    assert "versions" in differ(change(bumps=[1]), good)
    assert "random state" in differ(change(states=[torch.ones(2), torch.zeros(2)]), good)
    assert "generator" in differ(change(states=[torch.zeros(2), torch.ones(2)]), good)
    assert "raised" in differ(change(error=RuntimeError("a")), good)
    assert "raised" in differ(good, change(error=RuntimeError("a")))
    assert "raised" in differ(change(error=IndexError("a")), change(error=RuntimeError("a")))
    assert "raised" in differ(change(error=RuntimeError("b")), change(error=RuntimeError("a")))


def test_results_that_share_memory_with_a_buffer():
    buffer = torch.zeros(4)
    assert "aliasing" in differ(outcome(buffer[:2].clone(), held=[buffer]), outcome(buffer[:2], held=[buffer]))


def test_an_argument_or_gradient_that_differs():
    wrong = outcome(X + 1, (X + 1,), held=())
    with pytest.raises(AssertionError, match=r"in\[0\]"):
        oracle.same_call("call", wrong, dataclasses.replace(outcome(X + 1, (X,)), args=wrong.args, held=wrong.held), equal_values)
    none, some = (dataclasses.replace(outcome(X + 1), leaves=[("grad of in[0]", g)]) for g in (None, X))
    assert "grad of in[0]" in differ(none, some) and "grad of in[0]" in differ(some, none)


def test_what_eager_means():
    """No more is allowed than eager moves, and where it moves by a hundredth nothing is said."""
    plain = torch.tensor([1.0, -0.5, 0.25])
    value, (of_largest, of_each) = oracle.meaning(plain, [plain * (1 + 1e-5)], plain.double())
    assert torch.equal(value, plain.double()) and 0.5e-5 < of_largest < 2e-5 and 0.5e-5 < of_each < 2e-5
    assert oracle.meaning(plain, [plain], plain.double())[1] == (0.0, 0.0)
    assert oracle.meaning(plain, [plain * 1.03], plain.double())[1] is None
    assert oracle.meaning(torch.tensor([1, 2]), [torch.tensor([1, 3])], None)[1] is None
    assert oracle.meaning(plain, [torch.tensor([1.0, -0.5, float("inf")])], plain.double())[1] is None


def test_what_eager_means_where_nothing_watches():
    """A mode makes autograd take other formulas: a gradient that is NaN under one only is compared with double precision without."""
    eager, nan = torch.tensor([1.0, -0.5]), torch.full((2,), float("nan"))
    run = lambda t: [(None, [("grad of in[0]", t)])]  # noqa: E731
    reference = oracle.Reference(None)
    reference.plain, reference.wide, reference.bare = run(nan), run(nan.double()), run(eager.double() * (1 + 1e-6))
    value, spread = reference.leaf(0, 0, eager)
    assert torch.equal(value, eager.double() * (1 + 1e-6)) and spread == (0.0, 0.0)
    assert reference.leaf(0, 0, nan)[0].isnan().all()
    for other in (nan.double(), eager.double() * 2):
        reference.bare = run(other)
        assert reference.leaf(0, 0, eager) == (None, None)
    raised = [(RuntimeError("not a number"), [("in[0]", torch.zeros(3))])]  # where a mode watches
    reference.plain, reference.wide, reference.bare = raised, raised, run(eager.double())
    assert reference.leaf(0, 0, eager) == (None, None)


@torch.library.custom_op("vt_judge::reads_memory", mutates_args=())
def reads_memory(x: torch.Tensor) -> torch.Tensor:
    """Elements in the order in which they lie there: wrong where that is not theirs, as an op of eager's may be."""
    return torch.empty_like(x).copy_(x.as_strided(x.shape, torch.empty(x.shape).stride()) * 2)


def test_operands_in_other_memory():
    x = torch.arange(6.0).view(2, 3)
    for y in (x.t(), x):
        with oracle.Straight([]):
            out = reads_memory(y)
            drawn = torch.rand(3)
        assert torch.equal(out, y * 2) and out.stride() == y.stride() and drawn.shape == (3,)
    assert not torch.equal(reads_memory(x.t()), x.t() * 2)
    with oracle.Straight([drawn]):
        assert torch.equal(torch.rand(3), drawn)


def test_what_eager_means_where_it_contradicts_itself():
    """Of operands in contiguous memory it has something else: that is right then, and nothing else."""
    eager, own = torch.tensor([1.0, -0.5]), torch.tensor([1.5, -0.5])
    run = lambda t: [(None, [("out", t)])]  # noqa: E731
    reference = oracle.Reference(None)
    reference.plain, reference.straight = run(eager), run(own)
    assert torch.equal(reference.of_its_own(0, 0, eager), own)
    for straight in (run(eager * (1 + 1e-6)), run(own.double()), run(own[:1]), [(RuntimeError(), [("out", own)])], None):
        reference.straight = straight
        assert reference.of_its_own(0, 0, eager) is None


class Engine:
    """In place of the engine: what it counts, and says, of each call."""

    def __init__(self, monkeypatch, says=None, **counts):
        self.counters = {"compiled_calls": 0, "eager_calls": 0, "fallbacks": 0, "kernels_launched": 0}
        monkeypatch.setattr(vitrify, "counters", self.counters)

        def compiled(fn, dynamic):
            def run(*args):
                if says:
                    warnings.warn(says, vitrify.VitrifyWarning)
                for k, n in counts.items():
                    self.counters[k] += n
                return fn(*args)
            return run
        monkeypatch.setattr(oracle, "compiled", compiled)


def judged(seed=7, theme="classic", **more):
    p = program.Program(seed, 6, theme=theme)
    for k, v in more.items():
        setattr(p, k, v)
    assert p.settle(oracle.errors_of)
    return oracle.check(p, oracle.Reference(p))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("counts, says, kind", [
    (dict(compiled_calls=1, kernels_launched=1), None, "ok"),
    (dict(compiled_calls=1), None, "eager"),                                    # no kernel, though an op of ours made a result
    (dict(eager_calls=1), None, "eager"),
    (dict(compiled_calls=1, kernels_launched=1, fallbacks=1), None, "eager"),
    (dict(compiled_calls=1, kernels_launched=1), "vitrify: f runs eagerly: it may", "eager"),
    (dict(compiled_calls=1, kernels_launched=1), "vitrify: f runs eagerly: writes to a tensor that overlaps itself", "left"),
    (dict(), None, "eager"),                                                    # an engine that does nothing, and does not say so
], ids=str)
def test_how_a_program_ran(monkeypatch, counts, says, kind):
    Engine(monkeypatch, says, **counts)
    assert judged()["kind"] == kind


@pytest.mark.filterwarnings("ignore")
def test_why_a_call_ran_eagerly_is_named_where_it_is_only_noted(monkeypatch):
    Engine(monkeypatch, eager_calls=1)
    times = iter(range(9))
    monkeypatch.setattr(oracle, "noted", lambda: {"of another program": 3, "a number is another": next(times)})
    assert judged() == {"kind": "eager", "reason": "a number is another"}
    monkeypatch.setattr(oracle, "noted", lambda: {"of another program": 3})
    assert judged()["reason"].startswith("without a reason")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("says", ["vitrify: internal error while compiling f: x", "vitrify: a compiled call raised what eager does not, or what the program catches"])
def test_an_internal_error_is_a_failure(monkeypatch, says):
    Engine(monkeypatch, says, compiled_calls=1, kernels_launched=1)
    with pytest.raises(Mismatch, match=says[9:24]):
        judged()


@pytest.mark.parametrize("moves", [True, False])
def test_how_much_is_drawn_and_whether_it_raises(moves):
    """A rounding may decide both: then one of eager's own runs has it otherwise."""
    reference = oracle.Reference(None)
    reference.plain = [(None, [], [torch.zeros(2)])]
    reference.moved = [None] + [[(ValueError() if moves else None, [], [torch.full((2,), 1.0 * moves)])]] * oracle.MANY
    assert reference.decides(0, lambda run: run[2][0].tolist(), [0.0, 0.0]) == moves
    assert reference.decides(0, lambda run: type(run[0]), type(None)) == moves
    drawn, eager = outcome([], states=[torch.ones(2), torch.zeros(2)]), outcome([])
    oracle.same_call("call", drawn, eager, equal_values, lambda index: index == 0)
    with pytest.raises(Mismatch, match="the random state"):
        oracle.same_call("call", drawn, eager, equal_values, lambda index: index == 1)


def test_what_a_rounding_decides():
    """Only where double precision says otherwise than eager, and only for programs whose values are not halves."""
    eager, wide = torch.tensor([True, False, True]), torch.tensor([True, True, True])
    compare.check_value("x", wide, eager, wide, decided=True)
    for ours, reference, decided in ((wide, wide, False), (torch.tensor([False, True, True]), wide, True), (wide, eager, True), (wide, None, True), (wide, wide.int(), True)):
        with pytest.raises(Mismatch):
            compare.check_value("x", ours, eager, reference, decided=decided)


def test_another_order_is_the_same_but_for_roundings():
    x, y = torch.randn(7, 600, dtype=torch.float64), torch.randn(600, 5)
    aten = torch.ops.aten
    for func, args in ((aten.sum.dim_IntList, (x, [1])), (aten.sum.default, (x, None)), (aten.mean.dim, (x, [0, 1])), (aten.var.correction, (x, [-1])), (aten.std.correction, (x, None)), (aten.var_mean.correction, (x, [0])), (aten.prod.dim_int, (x / 8 + 1, 1)),
                       (aten.mm.default, (x.float(), y)), (aten.addmm.default, (torch.randn(5), x.float(), y)), (aten.baddbmm.default, (torch.randn(1, 7, 5), x.float()[None], y[None]))):
        args = args if args[1] is not None else args[:1]
        torch.testing.assert_close(oracle.in_another_order(func, list(args), {}), func(*args), **(bounds.SUMS if "mm" in func.__name__ else {}))
    one = torch.tensor([0.7123456789], dtype=torch.float64).expand(3)  # of one place: eager's variance of it is a rounding
    assert oracle.in_another_order(aten.var.correction, [one, [0]], {}) != aten.var.correction(one, [0])
    assert oracle.in_another_order(aten.amax.default, [x, [1]], {}) is None
    big = torch.tensor([[-1e30, 1e30]])  # a fused product is not rounded to infinity by itself
    assert oracle.in_another_order(aten.addmm.default, [torch.zeros(1), big, big.abs().t()], {}).isnan().all()
    terms = torch.tensor([1.0, 2 ** -53, 2 ** -53] * 3 + [-3.0], dtype=torch.float64)  # all of what is left is rounding
    assert oracle.in_another_order(aten.sum.default, [terms], {}) != aten.sum.default(terms)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_ops_give_is_moved(mode):
    """In inference mode too: results of halves, which are not moved where they are read, would not move at all."""
    with mode():
        x = torch.randn(64).bfloat16()
        with oracle.Jolts(2):
            moved = torch.log_softmax(x, -1)
        plain = torch.log_softmax(x, -1)
    assert not torch.equal(moved, plain)
    torch.testing.assert_close(moved, plain)


def test_sums_of_halves_in_single_precision_are_rounded():
    """A mean that nearly cancels keeps what the roundings of its sum were: halves themselves are not moved where they are read."""
    torch.manual_seed(0)
    x = torch.randn(64, 2).bfloat16()
    x[32:] = -x[:32]
    x[0] += 2 ** -6

    def means():
        net = torch.nn.BatchNorm1d(2)
        with torch.no_grad():
            out = net(x)
        assert out.dtype is torch.bfloat16
        return net.running_mean

    plain, moved = means(), []
    for seed in range(8):
        with oracle.Jolts(seed):
            moved.append(means())
    spread = torch.stack(moved).double().sub(plain.double()).abs().amax(0)
    assert (spread > 5e-10).all() and (spread < 1e-6).all()
    with oracle.Jolts(1):
        assert torch.sum(x, 0, dtype=torch.float32).dtype is torch.float32 and torch.native_layer_norm(x, (2,), None, None, 1e-5)[0].dtype is torch.bfloat16


def test_halves_move_by_no_rounding_one_and_two():
    """1.66 of 2^-5 is moved by two units by a factor of 1 + eps, and never to the number next to it."""
    x = torch.full((256,), 1.6640625 / 32).bfloat16()
    moved = {round((v - x[0].item()) / 2 ** -12) for v in (x * compare.steps(x, 1)).bfloat16().tolist()}
    assert moved == {-2, -1, 0, 1, 2}
    with torch.inference_mode(), oracle.Jolts(2):
        assert len(torch.dropout(torch.ones(64).half(), 0.3, True).unique()) > 2


@pytest.mark.parametrize("keepdim", [True, False])
def test_a_logarithm_that_cancels_what_was_taken_away(keepdim):
    x, aten = torch.randn(5, 3, dtype=torch.float64), torch.ops.aten.logsumexp.default
    x[0, 0], x[1], x[2] = float("inf"), float("-inf"), -torch.ones(3).exp().sum().log()
    torch.testing.assert_close(oracle.in_another_order(aten, [x, [1], keepdim], {}), aten(x, [1], keepdim), rtol=1e-7, atol=0)
    x = torch.tensor([[-0.693359375, -0.693359375], [-0.69287109375, -0.69287109375]]).half()
    others = {tuple(oracle.in_another_order(aten, [x * f, [1]], {}).tolist()) for f in (1, 1.001)}
    assert len(others) == 2


def test_what_is_nothing_but_roundings_may_be_zero():
    x = torch.tensor([1.0, 1.0, 1 + 2 ** -23])
    for fn, value in ((torch.var, 0.0), (torch.std, 0.0)):
        with oracle.Jolts(3):
            assert fn(x, [0]) == value and fn(torch.tensor([1.0, 2.0]), [0]) > 0.4 and fn(x.double() * torch.arange(3), [0]) > 0
        assert fn(x, [0]) > value


def test_roundings_of_equal_numbers_add_up():
    x, moved = torch.full((10000,), 0.5), set()
    for seed in range(2, 20, 4):
        with oracle.Jolts(seed):
            alike = x.exp().unique()
        assert len(alike) == 1
        moved.add(alike.item())
    with oracle.Jolts(3):
        apart = x.exp()
    assert len(moved) > 1 and len(apart.unique()) > 1


def test_halves_that_are_left_over_are_rounded_more_often():
    """Eager's vectors fuse what it rounds twice of the elements that fill none."""
    x = torch.full((4,), 6e4, dtype=torch.float16)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), oracle.Straight([]):
            assert torch.equal(torch.add(x, x, alpha=-1.5), torch.full((4,), -3e4, dtype=torch.float16))


def test_what_a_norm_leaves_of_a_mean():
    norm, x = torch.ops.aten.native_layer_norm.default, torch.full((1, 1, 2, 1), 3.3, dtype=torch.float16)
    _, mean, rstd = norm(x, [1], None, None, 1e-5)
    given = torch.full_like(x, 3e-5), mean, rstd  # the mean is rounded, by some kernels
    assert not oracle.cancelled(norm, x, given)[0].any() and oracle.cancelled(norm, x.float(), given) is given
    with oracle.Jolts(1):
        assert not torch.layer_norm(x, [1]).any() and torch.layer_norm(torch.tensor([[1.0, 2.0, 4.0]]).half(), [3]).all()


@pytest.mark.parametrize("came", [1, -1])
def test_nobody_says_which_sign_a_nan_has(came):
    """Runs that are moved have both, whichever it came with: that of one that is moved may be another already."""
    nan, signs = torch.copysign(torch.tensor(float("nan")), torch.tensor(came)).item(), []
    for seed in (2, 3):
        with oracle.Jolts(seed):
            signs.append([torch.copysign(torch.ones(2), torch.tensor([nan, -2.0])).tolist(), torch.signbit(torch.tensor([nan, 3.0])).tolist(), (torch.tensor([nan, 3.0]).view(torch.int32) < 0).tolist()])
    assert signs[0][0][0] == -signs[1][0][0] and signs[0][0][1] == signs[1][0][1] == -1
    for first, second in (signs[0][1:], signs[1][1:]):
        assert first == second
    assert signs[0][1] != signs[1][1] and not signs[0][1][1]


def test_products_that_overflow_on_the_way():
    """Eager adds unrounded products, and has an infinity of the first one's sign where an order that rounds each has both signs, and so none."""
    a, b = torch.tensor([[1e25, 1e25]]), torch.tensor([[1e25], [-1e25]])
    assert oracle.in_another_order(torch.ops.aten.mm.default, [a, b], {}).isnan().all()
    for small in (a / 1e20, a * float("inf")):
        assert oracle.in_another_order(torch.ops.aten.mm.default, [small, b], {}) is None


def test_derivatives_of_halves_that_leave_their_range():
    """A square on the way is infinite in eager alone; what a half result cannot hold is infinite in any case."""
    inf = float("inf")

    def overflows(eager, wide, ours):
        reference = oracle.Reference(None)
        reference.plain, reference.wide = [(None, [("told[0]", eager)])], [(None, [("told[0]", wide)])]
        return reference.overflows(0, 0, ours, eager)
    eager, wide = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]).double()
    assert overflows(eager, wide, torch.tensor([1.0, 5.0]))
    assert not overflows(eager, wide, torch.tensor([inf, 5.0])) and not overflows(eager, wide, eager) and not overflows(wide.float(), wide, eager)
    assert not overflows(torch.tensor([inf]).half(), torch.tensor([7e4]).double(), torch.tensor([6e4]).half())


@pytest.mark.parametrize("approximate, at", [("tanh", -6.0), ("none", -5.6)])
def test_what_gelu_adds_to_one_is_rounded(approximate, at):
    """Eager has 0 there, where -8e-11 or -6e-8 is as right."""
    x, gelu, more = torch.full((64,), at), torch.ops.aten.gelu.default, {"approximate": approximate}
    assert not gelu(x, **more).any()
    other = oracle.in_another_order(gelu, [x], more)
    assert other.any() and other.abs().max() < 1e-6
    x = torch.linspace(-3, 3, 64)
    torch.testing.assert_close(oracle.in_another_order(gelu, [x], more), gelu(x, **more), **bounds.SUMS)


def test_elements_elsewhere_are_the_same_but_for_what_is_no_number():
    """Eager's vectors give nothing for a NaN, and what is left over single."""
    aten, x, g = torch.ops.aten, torch.randn(3, 6).t(), torch.rand(6, 3)
    for func, args in ((aten.hardtanh_backward.default, (g, x, -1.0, 1.0)), (aten.gelu.default, (x,)), (aten.mul.Tensor, (x, g[0])), (aten.elu_backward.default, (g, 1.0, 1.0, 1.0, False, x))):
        for single in (False, True):
            there = oracle.in_another_order(func, list(args), {}, single)
            torch.testing.assert_close(there, func(*args))
            assert there.stride() == func(*args).stride()
    x[0, 0] = float("nan")
    there = [oracle.in_another_order(aten.hardtanh_backward.default, [g, x, -1.0, 1.0], {}, single)[0, 0].item() for single in (False, True)]
    assert there == [0.0, g[0, 0].item()]
    there = [oracle.in_another_order(aten.hardtanh_backward.default, [torch.tensor(1.0), torch.tensor(float("nan")), -1.0, 1.0], {}, single) for single in (False, True)]
    assert there[0].shape == () and [t.item() for t in there] == [0.0, 1.0]
    for func, args in ((aten.add_.Tensor, (x, g)), (aten.cumsum.default, (x, 0)), (aten.mul.Tensor, (x, torch.tensor(2.0)))):
        assert oracle.in_another_order(func, list(args), {}) is None


def test_gradients_of_norms_by_another_formula():
    aten, x, w = torch.ops.aten, torch.randn(7, 8, 5), torch.rand(8)
    _, mean, rstd = aten.native_group_norm.default(x, w, None, 7, 8, 5, 2, 1e-5)
    args = [torch.rand_like(x), x, mean, rstd, w, 7, 8, 5, 2, [True] * 3]
    torch.testing.assert_close(oracle.in_another_order(aten.native_group_norm_backward.default, args, {}), aten.native_group_norm_backward.default(*args))
    w = torch.rand(5)
    _, mean, rstd = aten.native_layer_norm.default(x, [5], w, w, 1e-5)
    args = [torch.rand_like(x), x, [5], mean, rstd, w, w, [True] * 3]
    torch.testing.assert_close(oracle.in_another_order(aten.native_layer_norm_backward.default, args, {}), aten.native_layer_norm_backward.default(*args))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("right", [True, False])
def test_a_program_in_which_eager_contradicts_itself(monkeypatch, right):
    """What is right of contiguous operands passes, and what is neither that nor eager's does not."""
    Engine(monkeypatch, compiled_calls=1, kernels_launched=1)
    p = program.Program(7, 1, theme="classic")
    p.specs = [values.Spec((3, 4), "F32", seed=1, layout="swapped"), values.Spec((1,), "I64", seed=2, below=3)]
    p.body = program.Body(["x0", "index", "scale"], False)
    p.body.lines, p.body.results = ["v0 = torch.ops.vt_judge.reads_memory(x0)", "v1 = v0 * 1"], ["v1"]
    p.calls = [calls.Call(tuple(p.specs))]
    monkeypatch.setattr(oracle, "compiled", lambda fn, dynamic: lambda x, *_: (x * 2,) if right else (x * 3,))
    if right:
        assert oracle.check(p, oracle.Reference(p))
    else:
        with pytest.raises(Mismatch, match="error"):
            oracle.check(p, oracle.Reference(p))


def test_long_sums_of_doubles():
    """Only what is added up in double precision, by the number of terms: of small programs less than what doubles are allowed anyway."""
    def allowed(shape, dtype):
        run = types.SimpleNamespace(program=types.SimpleNamespace(calls=[types.SimpleNamespace(specs=(values.Spec(shape),)), types.SimpleNamespace(specs=None)]))
        return [oracle.Reference.with_sums(run, call, torch.ones(2, dtype=dtype), (0.0, 1e-3)) for call in (0, 1)]
    eps = torch.finfo(torch.float64).eps
    assert allowed((70000,), torch.float32) == [(0.0, 1e-3)] * 2
    assert allowed((70000,), torch.float64) == [(70000 * eps / 16, 1e-3)] * 2
    assert allowed((33, 30), torch.float64)[0][0] < 64 * eps
