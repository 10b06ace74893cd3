"""A gradient of gradients may be asked for what eager's nodes do not lead to, though the call that gave them does by way of another: eager runs nothing then,
and frees nothing. A compiled call has one node where eager has several, and raised "second time" in the next backward."""
import itertools

import bounds
import pytest
import torch
import vitrify

PROGRAMS = {
    "product": lambda x, w: x * w,
    "sin": lambda x, w: (x * w).sin(),
    "matmul": lambda x, w: (x @ w).cos(),
    "two of one": lambda x, w: (x * w).exp() + w * x.cos(),
    "not of both": lambda x, w: x.sin() * 2 + w.detach(),
}


def chain(f, length):
    torch.manual_seed(0)
    x, w = (torch.rand(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    made = [x, w]
    for _ in range(length):
        made.append(f(x, made[-1]))
    return made


def asks(f, length, of, retain):
    """Gradients of all that the calls gave, and then, one after the other, of those: which come, and what raises."""
    made = chain(f, length)
    results = [t for t in made[2:] if t.requires_grad]
    first = torch.autograd.grad(results, made[:2], [torch.ones_like(t) for t in results], create_graph=True, allow_unused=True)
    seen = []
    for k, g in enumerate(g for g in first if g is not None and g.requires_grad):
        for to in of:
            try:
                found = torch.autograd.grad(g, made[to], torch.full_like(g, 2 + k), retain_graph=retain, allow_unused=True)
                seen.append(found[0])
            except RuntimeError as e:
                seen.append(str(e))
    return seen


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_not_led_to_is_not_freed(name, length, dynamic):
    f = PROGRAMS[name]
    compiled = vitrify.compile(f, dynamic=dynamic)
    for retain, of in itertools.product([False, True], itertools.permutations(range(length + 2), min(3, length + 2))):
        ours, eager = asks(compiled, length, of, retain), asks(f, length, of, retain)
        assert len(ours) == len(eager) > 0
        for k, (a, b) in enumerate(zip(ours, eager, strict=True)):
            where = f"{of}, {retain}, {k}"
            if isinstance(a, str) or isinstance(b, str) or a is None or b is None:
                assert a == b, where
            else:
                torch.testing.assert_close(a, b, **bounds.DEEP, msg=lambda m, where=where: f"{where}: {m}")
