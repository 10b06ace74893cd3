"""What every test holds the engine to: it runs native kernels, and nothing eagerly that the test has not announced (tests/conftest.py looks after each).

A test that expects otherwise says so, by a marker of the same name or where it runs, and is held to that too:
    eager("part of the reason that the engine gives", ...)    calls run eagerly; each part must have been the reason of one, and each reason must have a part
    eager(..., some=True)                                     the same for the cases of a test of which some run eagerly: a part need not be the reason of any
    compiled("why")                                           calls are compiled, but launch no kernel: ATen computes all of it, or there is nothing to compute
    no_kernels("why")                                         nothing is compiled here, or it is not this process that compiles; a marker without some=True: of all cases
    judged("by what")                                         programs drawn at random: a judge of their own counts and bounds what runs eagerly; internal errors fail all the same"""
import sys

SHORTEST = 4  # characters of a text: fewer would match anything


class Expected:
    def __init__(self):
        self.eager, self.some, self.compiled, self.no_kernels, self.judged = [], [], [], [], []
        self.strict = False  # no_kernels is of the whole test


_now = Expected()


def _checked(texts):
    for text in texts:
        if not isinstance(text, str) or len(text) < SHORTEST:
            raise ValueError(f"what is expected is a text of at least {SHORTEST} characters, not {text!r}")
    return list(texts)


def eager(*parts, some=False):
    (_now.some if some else _now.eager).extend(_checked(parts))


def compiled(why):
    _now.compiled += _checked([why])


def no_kernels(why, some=True):
    _now.no_kernels += _checked([why])
    _now.strict |= not some


def judged(by):
    _now.judged += _checked([by])


class Watch:
    """What the engine did since it was made, over all resets."""

    def __init__(self):
        self.reasons, self.counts = _reasons(), _counts()

    def since(self):
        said = {why: n - self.reasons.get(why, 0) for why, n in _reasons().items() if n > self.reasons.get(why, 0)}
        return said, {name: n - self.counts.get(name, 0) for name, n in _counts().items()}

    def wrong(self, expected):
        """What the engine did and nobody announced, or the other way round."""
        said, did = self.since()
        kernels, calls = did.get("kernels_launched", 0), did.get("compiled_calls", 0)
        if expected.judged:
            said = {why: n for why, n in said.items() if "internal error" in why or "raised what eager does not" in why}
        parts = expected.eager + expected.some
        wrong = [f"ran eagerly ({n} times), and the test does not announce it: {why}" for why, n in said.items() if not any(part in why for part in parts)]
        wrong += [f"the test announces that calls run eagerly, and none did for this reason: {part}" for part in expected.eager if not any(part in why for why in said)]
        if kernels and expected.strict:
            wrong.append(f"{kernels} kernels ran, and the test announces none: {', '.join(expected.no_kernels)}")
        if not kernels and not said and not expected.no_kernels and not expected.judged and not (calls and expected.compiled):
            wrong.append("no native kernel ran, and the test does not say why" if not expected.compiled else "nothing was compiled")
        return wrong


def _engine():
    return getattr(sys.modules.get("vitrify"), "_C", None)


def _reasons():
    engine = _engine()
    return engine.eager_reasons() if engine else {}


def _counts():
    engine = _engine()
    return engine.lifetime_counters() if engine else {}


def begin(item):
    global _now
    _now = Expected()
    for name, announce in (("eager", eager), ("compiled", compiled), ("no_kernels", no_kernels), ("judged", judged)):
        for marker in item.iter_markers(name):
            announce(*marker.args, **({"some": False} if name == "no_kernels" else {}) | marker.kwargs)
    return Watch()


def end(watch):
    wrong = watch.wrong(_now)
    assert not wrong, "the engine:\n  " + "\n  ".join(wrong)
