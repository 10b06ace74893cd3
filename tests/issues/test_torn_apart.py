"""What has the memory of another tensor, and to autograd is none of its views (unsafe_split, unsafe_chunk, _unsafe_view): returned, it had the history of a view, without
what was written; and _unsafe_view of a temporary had memory of its own."""
import expects
import pytest
import torch
import vitrify

view = torch.ops.aten._unsafe_view
PROGRAMS = {
    "written": lambda x: x.unsafe_chunk(2)[0].mul_(3), "by exp": lambda x: (x * 1).unsafe_chunk(2)[1].exp_(), "both": lambda x: (lambda h: (lambda a: (h, a))(h.unsafe_chunk(2)[0].mul_(3)))(x * 1), "parts": lambda x: x.unsafe_chunk(2),
    "one": lambda x: x.unsafe_split(1)[1], "sizes": lambda x: x.unsafe_split_with_sizes([1, 3])[1].mul_(2), "of a temporary": lambda x: (x * 2).unsafe_chunk(2), "read": lambda x: (lambda p: p[0] * p[1])((x * 2).unsafe_chunk(2)),
    "read after a write": lambda x: (lambda p: p[0].mul_(p[1]) * 2)((x * 2).unsafe_chunk(2)), "viewed": lambda x: (lambda h: (lambda v: (v.mul_(3), h * 2)[1])(view(h, [8])))(x * 1), "viewed, the other": lambda x: (lambda h: (lambda v: (h.mul_(3), v * 2)[1])(view(h, [8])))(x * 1),
    "viewed, alone": lambda x: view(x * 1, [8]).mul_(3), "of an argument": lambda x: view(x, [8]).mul_(3), "both viewed": lambda x: (lambda h: (h, view(h, [8])))(x * 1), "viewed and read": lambda x: view(x * 2, [8]) * 3,
}


@pytest.mark.eager("shares memory with another, by unsafe_split", "has also by _unsafe_view", "memory that has no tensor of its own", some=True)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name, grad):
    if name in ("parts", "one"):
        expects.no_kernels("nothing but views")
    told = []
    for f in (PROGRAMS[name], vitrify.compile(PROGRAMS[name])):
        for _ in range(2):
            x = torch.arange(8.0).view(4, 2)
            given = x.clone().requires_grad_(grad)
            out = f(given * 1 if "argument" in name or name in ("written", "sizes") else given)
            out = out if isinstance(out, tuple) else (out,)
            told.append([*out, *(torch.tensor([t._is_view(), t._base is given]) for t in out)])
            if grad:
                sum((t * 2).sum() for t in out).backward()
                told[-1].append(given.grad)
            with torch.no_grad() if name != "parts" else torch.enable_grad():
                before = [t._version for t in out], given._version
                changed = out[0].mul_(2)
                told[-1] += [changed, torch.tensor([*(t._version - v for t, v in zip(out, before[0])), given._version - before[1]])]
    torch.testing.assert_close(told[2:], told[:2])
