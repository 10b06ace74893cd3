"""Custom ops whose authors describe other results than they give: eager's results, the op runs once in each call, and what else the call wrote is right."""
import pytest
import torch
import vitrify

CALLS = [0]


def liar(name, gives):
    @torch.library.custom_op(f"liars::{name}", mutates_args=(), schema="(Tensor x) -> Tensor")
    def op(x):
        CALLS[0] += 1
        return gives(x)
    op.register_fake(torch.empty_like)
    return op


OPS = {name: liar(name, gives) for name, gives in dict(
    smaller=lambda x: x[:1].clone(), larger=lambda x: torch.cat([x, x]), scalar=lambda x: x.sum(), rank=lambda x: x[None].clone(), double=lambda x: x.double(),
    half=lambda x: x.half(), strides=lambda x: x.t().contiguous().t(), expanded=lambda x: x[:1].clone().expand(4, 6), nothing=lambda x: x[:0].clone(),
    content=lambda x: x[x[:, 0] > 0]).items()}
PROGRAMS = {
    "times": lambda o: lambda x: o(x) * 2,
    "itself": lambda o: lambda x: o(x),
    "view": lambda o: lambda x: o(x).view(-1) + 1,
    "mm": lambda o: lambda x: o(x) @ x.t(),
    "after a write": lambda o: lambda x: (x.add_(1), o(x) + x)[1],
    "into an argument": lambda o: lambda x: x.copy_(o(x)),
    "twice": lambda o: lambda x: (o(x), o(x + 1) + 1),
    "of itself": lambda o: lambda x: o(o(x) + 1) * 2,
    "unread": lambda o: lambda x: (o(x), x * 2)[1],
    "its sizes": lambda o: lambda x: torch.zeros(o(x).shape) + 1,
    "its dtype": lambda o: lambda x: torch.zeros(2, dtype=o(x).dtype) + 1,
}


def outcome(f, x):
    CALLS[0] = 0
    try:
        with torch.no_grad():
            out = f(x)
        return [out] if isinstance(out, torch.Tensor) else list(out)
    except Exception as e:
        return [type(e), str(e).partition("\n")[0].partition(":")[0]]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.judged("what is said of a program holds only for some")
def test_a_description_that_lies(op, program, dynamic):
    fn = program(op)
    compiled = vitrify.compile(fn, dynamic=dynamic)
    for seed in range(4):
        given = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        x, y = given.clone(), given.clone()
        eager, ran = outcome(fn, x), CALLS[0]
        ours = outcome(compiled, y)
        assert CALLS[0] == ran and torch.equal(x, y)
        if isinstance(eager[0], type) or isinstance(ours[0], type):
            assert ours == eager
        else:
            torch.testing.assert_close(ours, eager, equal_nan=True)
            assert [t.stride() for t in ours] == [t.stride() for t in eager]


def test_other_custom_ops_before_it_run_once():
    ran = []

    @torch.library.custom_op("liars::honest", mutates_args=())
    def honest(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x + 1
    honest.register_fake(torch.empty_like)
    op = liar("after_another", lambda x: x[:2].clone())

    def program(x):
        return op(honest(x)).sin()
    compiled, x = vitrify.compile(program), torch.randn(4, 6)
    import expects
    expects.eager("liars::after_another: result 0 is")
    with torch.no_grad():
        for _ in range(2):
            eager, n = program(x), len(ran)
            torch.testing.assert_close(compiled(x), eager)
            assert len(ran) == n + 1


@torch.library.custom_op("liars::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


scaled.register_fake(torch.empty_like)


@pytest.mark.judged("what is said of a program holds only for some")
@pytest.mark.parametrize("after", [lambda y: y.double(), lambda y: y, lambda y: torch.empty_like(y).fill_(1), lambda y: (y + 1).transpose(0, 1), lambda y: y.float() * y.sum()])
@pytest.mark.parametrize("shape", [(4, 1, 4, 4), (4, 4, 1, 4), (1, 8), (33, 3, 1, 1), (5, 1)], ids=str)
def test_strides_along_dims_of_one(shape, after):
    """They say nothing of memory, but a program sees them: what follows the op has those of its real result."""
    f = lambda x: after(scaled(x))
    compiled = vitrify.compile(f)
    for x in (torch.randn(shape), torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))), torch.randn(*shape, 2)[..., 0], torch.randn(shape).transpose(-1, -2).contiguous().transpose(-1, -2)):
        for _ in range(3):
            ours, eager = compiled(x), f(x)
            assert ours.stride() == eager.stride()
            torch.testing.assert_close(ours, eager)
