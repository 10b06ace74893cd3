"""Custom ops run as often as in eager, after what comes before them has not raised; what they gave to a call that is run again is what they gave: lists among
other results, draws from a generator of the user's, arguments of another size; and ATen's formulas see no mode then."""
import pytest
import torch
import vitrify

log = []
G = torch.Generator()


@torch.library.custom_op("in_order::eff", mutates_args=())
def eff(x: torch.Tensor) -> torch.Tensor:
    log.append(x.flatten()[0].item())
    return x + 1


@eff.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("in_order::drawing", mutates_args=())
def drawing(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(x.shape, generator=G) + torch.rand(x.shape)


@drawing.register_fake
def _(x):
    return torch.empty_like(x)


lib = torch.library.Library("in_order", "FRAGMENT")
lib.define("comp(Tensor x) -> Tensor")
lib.impl("comp", lambda x: eff(x) * 2, "CompositeImplicitAutograd")
lib.define("mix(Tensor x) -> (Tensor, Tensor[], Tensor)")
lib.impl("mix", lambda x: (x * 3, [x * 2, x + 1], x - 1), "CPU")
torch.library.register_fake("in_order::mix", lambda x: (torch.empty_like(x), [torch.empty_like(x), torch.empty_like(x)], torch.empty_like(x)), lib=lib)
lib.define("lists(Tensor x) -> (Tensor[], Tensor[])")
lib.impl("lists", lambda x: ([x * 3], [x * 2, x + 1]), "CPU")
torch.library.register_fake("in_order::lists", lambda x: ([torch.empty_like(x)], [torch.empty_like(x), torch.empty_like(x)]), lib=lib)
lib.define("twice(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
lib.impl("twice", lambda x, *, out: out.resize_(x.shape).copy_(x * 2), "CPU")
torch.library.register_fake("in_order::twice", lambda x, *, out: out, lib=lib)


def outcome(f, *args):
    log.clear()
    G.manual_seed(1)
    torch.manual_seed(0)
    try:
        r = f(*args)
        r = [t.tolist() for t in (r if isinstance(r, tuple) else (r,))]
    except (IndexError, RuntimeError) as error:
        r = str(error).partition("\n")[0]
    return r, list(log), torch.rand(2).tolist(), torch.rand(2, generator=G).tolist(), [a.tolist() for a in args]


T = lambda: torch.arange(1.0, 11)  # noqa: E731
RAISING = {
    "index": lambda i: T()[i], "gather": lambda i: T().gather(0, i), "take": lambda i: T().take(i), "division": lambda i: (T()[:4].long() // (i < 30).long()).float(),
    "embedding": lambda i: torch.nn.functional.embedding(i, T().view(10, 1)).view(4), "scatter": lambda i: T().scatter(0, i, 1.0)[:4], "index_put": lambda i: T().index_put((i,), torch.ones(4))[:4],
    "cholesky": lambda i: torch.linalg.cholesky(torch.eye(4) * (30 - i)).diagonal(),
}
AFTER = {
    "used": lambda y, x: y * eff(x), "beside": lambda y, x: (eff(x), y + 1), "drawn": lambda y, x: y * eff(drawing(x)), "twice": lambda y, x: y * eff(eff(x)), "draws": lambda y, x: y * eff(x + torch.rand(4)),
}


@pytest.mark.sweep(3)
@pytest.mark.filterwarnings("ignore:.*a compiled call raised")
@pytest.mark.no_kernels("library calls, or the program raises", some=True)
@pytest.mark.parametrize("caught", [False, pytest.param(True, marks=pytest.mark.eager("what the program catches"))])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("raising", RAISING)
def test_what_raises_comes_before(raising, after, mode, caught):
    def program(i, x):
        y = RAISING[raising](i)
        return AFTER[after](y, x)

    def catches(i, x):
        try:
            return program(i, x)
        except (IndexError, RuntimeError):
            return AFTER[after](x * 2, x * 10)
    f = catches if caught else program
    compiled = vitrify.compile(f)
    with mode():
        for last in (3, 33, 2, 33):
            i, x = torch.tensor([0, 1, 2, last]), torch.ones(4)
            assert outcome(compiled, i.clone(), x.clone()) == outcome(f, i, x), last


def other_way(op):
    def program(x):
        y = torch.rand(3, generator=G)
        o = op(x)
        if x.sum() > 0:
            return (o * y).sin()
        o.numpy()
        return o + y + torch.rand(3, generator=G)
    return program


def ranks(x):
    o = eff(x)
    if x.sum() > 0:
        return o * 2
    o.numpy()
    return torch.linalg.matrix_rank(x.view(1, 3) * torch.ones(3, 1), out=torch.empty(0, dtype=torch.long))


AGAIN = {
    "a list": other_way(lambda x: sum(torch.ops.in_order.mix(x)[1]) + torch.ops.in_order.mix(x)[2]), "lists": other_way(lambda x: sum(torch.ops.in_order.lists(x)[1])),
    "a generator": other_way(drawing), "a generator twice": other_way(lambda x: drawing(drawing(x))), "a rank": ranks,
    "a composite": lambda x: torch.linalg.cholesky(torch.ops.in_order.comp(x) * torch.eye(3)),
}


@pytest.mark.filterwarnings("ignore:.*eagerly")
@pytest.mark.filterwarnings("ignore:.*a compiled call raised")
@pytest.mark.no_kernels("library calls, or the program raises", some=True)
@pytest.mark.eager("looks into the memory of a tensor", "a value that the program reads is another", "what the program catches", "gives several lists of tensors", some=True)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", AGAIN)
def test_what_ran_is_known(name, mode):
    compiled = vitrify.compile(AGAIN[name])
    with mode():
        for sign in (1, -1, 1, -1):
            x = sign * torch.ones(3)
            ours, theirs = outcome(compiled, x), outcome(AGAIN[name], x)
            assert ours[1:] == theirs[1:]
            if isinstance(theirs[0], str):
                assert ours[0] == theirs[0]
            else:
                torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(theirs[0]))


@pytest.mark.parametrize("size", [(2, 3), *(pytest.param(size, marks=pytest.mark.eager("in_order::twice: result 0 is")) for size in ((6,), (0,), (1,)))], ids=str)
def test_an_argument_gets_another_size(size):
    def program(x, o):
        y = x.sin() * 2
        torch.ops.in_order.twice(x, out=o)
        return y.cos()
    compiled = vitrify.compile(program)
    with torch.no_grad():
        for _ in range(3):
            x, o = torch.arange(6.0).view(2, 3), torch.zeros(size)
            torch.testing.assert_close(compiled(x, o), program(x, torch.zeros(size)))
            assert torch.equal(o, x * 2)
