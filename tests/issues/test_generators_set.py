"""A program that sets the state of a generator runs eagerly, also where the generator is in that state already; captures leave generators to other threads."""
import random
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import vitrify
from expects import eager

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from test_threads import in_threads  # noqa: E402

G = torch.Generator()
STATES = {}


def fresh(g):
    pass


def drawn(g):
    torch.rand(5, generator=g)


def drawn_all(g):
    torch.rand(624, generator=g)


def sets_default(x):
    torch.set_rng_state(STATES[None])
    return F.dropout(x) + 1


def seeds_default(x):
    torch.manual_seed(3)
    return F.dropout(x) + 1


def sets_only(x):
    torch.set_rng_state(STATES[None])
    return x.sin() + 1


def sets_between(x):
    y = F.dropout(x)
    torch.set_rng_state(STATES[None])
    return y + F.dropout(x)


def sets_own(x):
    G.set_state(STATES[G])
    return torch.rand(8, generator=G) + x


def seeds_own(x):
    G.manual_seed(3)
    return torch.rand(8, generator=G) + x


def seeds_own_only(x):
    G.manual_seed(3)
    return x.sin() + 1


def calls(f, before, n=3):
    x = torch.linspace(0, 1, 8)
    torch.manual_seed(3)
    G.manual_seed(3)
    for key, g in ((None, torch.default_generator), (G, G)):
        before(g)
        STATES[key] = g.get_state()
    return [t for _ in range(n) for t in (f(x), torch.rand(2), torch.rand(2, generator=G))]


@pytest.mark.parametrize("before", [fresh, drawn, drawn_all])
@pytest.mark.parametrize("program", [sets_default, seeds_default, sets_only, sets_between, sets_own, seeds_own, seeds_own_only])
def test_sets_a_state(program, before):
    expected = calls(program, before)
    eager("sets the state of a random number generator")
    for a, b in zip(calls(vitrify.compile(program), before), expected):
        assert torch.equal(a, b)


@pytest.mark.parametrize("before", [fresh, drawn, drawn_all])
def test_draws_are_as_in_eager(before):
    def program(x):
        return torch.rand(8, generator=G) + F.dropout(x)
    for a, b in zip(calls(vitrify.compile(program), before), calls(program, before)):
        assert torch.equal(a, b)
    assert torch.initial_seed() == 3 and G.initial_seed() == 3


def test_a_seed_is_read():
    program = lambda x: x.sin() * (torch.initial_seed() % 100)  # noqa: E731
    compiled, x = vitrify.compile(program), torch.ones(4)
    eager("it reads the seed of the process's random generator")
    for seed in (3, 4):
        torch.manual_seed(seed)
        assert torch.equal(compiled(x), program(x))


@pytest.mark.parametrize("how, draw", [(lambda: random.seed(3), random.random), (lambda: random.setstate(STATES["python"]), random.random),
                                       (lambda: np.random.seed(3), np.random.rand), (lambda: np.random.set_state(STATES["numpy"]), np.random.rand)],
                         ids=["seed", "setstate", "numpy seed", "numpy set_state"])
def test_what_is_not_torchs_is_set_to_what_it_is(how, draw):
    random.seed(3)
    np.random.seed(3)
    STATES.update(python=random.getstate(), numpy=np.random.get_state())

    def program(x):
        how()
        return x.sin()
    compiled = vitrify.compile(program)
    eager("it sets the state of")
    numbers = []
    for _ in range(2):
        compiled(torch.ones(4))
        numbers.append(draw())
    assert numbers[0] == numbers[1]


def beside_a_capture(program, act):
    """What `act` gives on another thread, while a capture of `program` runs on this one; twice what the program gives."""
    inside, acted, got = threading.Event(), threading.Event(), []

    def waits(x):
        y = program(x)
        inside.set()
        assert acted.wait(30)
        return y + program(x)

    def acts():
        assert inside.wait(30)
        got.append(act())
        acted.set()
    torch.manual_seed(3)
    thread = threading.Thread(target=acts)
    thread.start()
    result = vitrify.compile(waits)(torch.ones(4))
    thread.join()
    return got[0], result


def test_other_threads_draw_what_they_draw():
    """While a capture runs, also of a generator that was just seeded."""
    numbers = [beside_a_capture(lambda x: x.sin() + 1, lambda: torch.rand(3))[0], torch.rand(3)]
    torch.manual_seed(3)
    assert torch.equal(numbers[0], torch.rand(3)) and torch.equal(numbers[1], torch.rand(3))


@pytest.mark.parametrize("draw", [False, True], ids=["no draws", "draws"])
def test_captures_on_many_threads(draw):
    def program(x):
        return (F.dropout(x) if draw else x).sin() + 1
    start = threading.Barrier(4, timeout=60)

    def body(k):
        compiled = vitrify.compile(program)
        for n in range(2, 10):
            start.wait()
            compiled(torch.ones(n + k))
    torch.manual_seed(3)
    in_threads(4, body)
    if not draw:
        now = torch.rand(3)
        torch.manual_seed(3)
        assert torch.equal(now, torch.rand(3))


def test_a_capture_that_waits_for_another():
    """They take turns, but not for ever."""
    other, ours = beside_a_capture(lambda x: x.cos() + 1, lambda: vitrify.compile(lambda x: x.sin() + 1)(torch.ones(4)))
    assert torch.equal(other, torch.ones(4).sin() + 1)
    torch.testing.assert_close(ours, (torch.ones(4).cos() + 1) * 2)
    now = torch.rand(3)
    torch.manual_seed(3)
    assert torch.initial_seed() == 3 and torch.equal(now, torch.rand(3))


@pytest.mark.parametrize("read", [lambda g: torch.default_generator.initial_seed(), lambda g: g.initial_seed(), lambda g: torch.random.initial_seed()], ids=["default", "argument", "function"])
def test_a_seed_is_read_from_the_generator(read):
    """A capture marks the seeds of generators: the program computed with the mark."""
    def program(x, g):
        return x.sin() * (read(g) % 1000), torch.rand(2, generator=g)
    eager("it reads the seed of the process's random generator")
    compiled, x, g = vitrify.compile(program), torch.ones(4), torch.Generator()
    for seed in (3, 4):
        numbers = []
        for f in (program, compiled):
            torch.manual_seed(seed)
            numbers.append(f(x, g.manual_seed(seed + 5)))
        torch.testing.assert_close(*numbers, rtol=0, atol=0)
    made = torch.Generator().manual_seed(11)
    assert vitrify.compile(lambda x: x.sin() * made.initial_seed())(x).equal(x.sin() * 11)


def test_other_threads_read_the_seed():
    def look():
        torch.manual_seed(torch.initial_seed() + 0)
        return torch.initial_seed(), torch.default_generator.initial_seed()
    eager("sets the state of a random number generator")
    assert beside_a_capture(lambda x: x.sin() + 1, look)[0] == (3, 3)


def test_states_that_other_threads_keep():
    state, _ = beside_a_capture(lambda x: x.sin() + 1, torch.get_rng_state)
    torch.manual_seed(9)
    torch.set_rng_state(state)
    assert torch.initial_seed() == 3


@pytest.mark.parametrize("draw", [False, True], ids=["no draws", "draws"])
def test_what_another_thread_sets_stays(draw):
    eager("sets the state of a random number generator")
    beside_a_capture(lambda x: x.sin() + 1, lambda: torch.manual_seed(5))
    now = torch.initial_seed(), torch.rand(3)
    torch.manual_seed(5)
    assert now[0] == 5 and torch.equal(now[1], torch.rand(3))
    if draw:  # the draws of the call, which eager makes anew, are all that comes after the seed
        beside_a_capture(lambda x: F.dropout(x) + 1, lambda: torch.manual_seed(5))
        assert torch.initial_seed() == 5


@pytest.mark.parametrize("seeds", [False, True], ids=["draws", "seeds the default one"])
def test_an_argument_that_another_thread_sets(seeds):
    """What each thread has set of each generator counts by itself."""
    g = torch.Generator().manual_seed(1)

    def program(x):
        y = torch.rand(4, generator=g) + x
        if seeds:
            torch.manual_seed(7)
        return y
    eager("sets the state of a random number generator")
    beside_a_capture(program, lambda: g.manual_seed(5))
    assert g.initial_seed() == 5


def test_the_default_one_that_another_thread_sets():
    g = torch.Generator().manual_seed(1)

    def program(x):
        g.manual_seed(7)
        return x.sin()
    eager("sets the state of a random number generator")
    beside_a_capture(program, lambda: torch.manual_seed(5))
    assert torch.initial_seed() == 5


@torch.library.custom_op("vitrify_set::draws", mutates_args=())
def draws(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(2)


@draws.register_fake
def _(x):
    return torch.empty_like(x)


def forked(op, x):
    with torch.random.fork_rng():
        torch.manual_seed(42)
        return op(x)


def restored(op, x):
    state = torch.get_rng_state()
    torch.manual_seed(42)
    y = op(x)
    torch.set_rng_state(state)
    return y + torch.rand(2)


@pytest.mark.eager("sets the state of a random number generator")
@pytest.mark.parametrize("op", [draws, lambda x: x + torch.ops.prims.normal([2], mean=0.0, std=1.0, dtype=torch.float32, device=torch.device("cpu"), requires_grad=False)], ids=["custom", "prims"])
@pytest.mark.parametrize("program", [forked, restored])
def test_a_seed_for_an_op_that_draws_unseen(program, op):
    """The state was back in its place when the capture ended."""
    def outcome(f):
        torch.manual_seed(3)
        return [t for _ in range(3) for t in (f(torch.ones(2)), torch.rand(1))]
    compiled = vitrify.compile(lambda x: program(op, x))
    for a, b in zip(outcome(compiled), outcome(lambda x: program(op, x)), strict=True):
        assert torch.equal(a, b)
