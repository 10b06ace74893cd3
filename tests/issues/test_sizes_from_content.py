"""Sizes that only the run finds, and sizes that guards have fixed: none, one or many elements, and the one that broadcasts."""
import beside
import expects
import pytest
import torch
import torch.nn.functional as F
import vitrify

A = lambda *v: torch.tensor(v)  # noqa: E731


@torch.library.custom_op("vitrify_sizes::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].clone()


@positive.register_fake
def _(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


CONTENT = {
    "mask and number": lambda x: x[x > 0] * 2 + 1,
    "mask and itself": lambda x: (lambda v: v * v - v)(x[x > 0]),
    "rows": lambda x: torch.nonzero(x > 0)[:, 0] + 1,
    "twice": lambda x: (lambda v: torch.relu(v[v > 1]) * 3)(x[x > 0]),
    "where": lambda x: torch.where(x > 0)[0] * 2,
    "unique": lambda x: torch.unique(x) + 0.5,
    "broadcasts where it is one": lambda x: torch.unique_consecutive(x)[:1] * torch.ones(2, 3) + x.sum(),
    "a size as a number": lambda x: (x > 0).nonzero().shape[0] * x,
    "a size as a divisor": lambda x: x.sum() / (x[x > 0].numel() + 1),
    "how many there are": lambda x: x + torch.unique(x).shape[0],
    "a custom op beside": lambda x: torch.ops.vitrify_sizes.positive(x) * 2 + 1,
}
VALUES = {"many": [A(1.0, -2.0, 3.0, 4.0, 4.0)], "one": [A(1.0, -2.0, -3.0, -4.0, -4.0)], "none": [A(-1.0, -2.0, -3.0, -4.0, -4.0)]}
VALUES |= {"many, one, none, many": [VALUES[k][0] for k in ("many", "one", "none", "many")], "none, one, many": [VALUES[k][0] for k in ("none", "one", "many")]}


@pytest.mark.parametrize("values", VALUES.values(), ids=list(VALUES))
@pytest.mark.parametrize("fn", CONTENT.values(), ids=list(CONTENT))
def test_content(fn, values):
    """One plan serves every number of elements."""
    compiled, before = vitrify.compile(fn), dict(vitrify.counters)
    with torch.no_grad():
        for x in values:
            a, b = x.clone(), x.clone()
            beside.same_call(beside.run(compiled, (a,)), beside.run(fn, (b,)), (a,), (b,))
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    assert did["captures"] == 1 and did["compiled_calls"] == len(values) and did["kernels_launched"] > 0


@pytest.mark.parametrize("values", VALUES.values(), ids=list(VALUES))
@pytest.mark.eager("a size that follows from content is not what the plan is for", some=True)  # how its columns lie is another matter for one row
def test_columns(values):
    fn = lambda x: torch.argwhere(x > 0).float().sum(0)  # noqa: E731
    compiled, before = vitrify.compile(fn), dict(vitrify.counters)
    with torch.no_grad():
        for x in [VALUES["many"][0], *values]:
            beside.same_call(beside.run(compiled, (x,)), beside.run(fn, (x,)), (x,), (x,))
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"]


FIXED = {  # with a size of 2 what is left of it is 1, which broadcasts
    "slice": (lambda x, y: x[1:] * y, (A(3.0, 7.0), torch.arange(5.0))),
    "slice of columns": (lambda x, y: x[:, 1:] * y, (A([3.0, 7.0], [1.0, 2.0]), torch.arange(10.0).view(2, 5))),
    "half": (lambda x, y: x[::2] + y, (A(3.0, 7.0), torch.arange(4.0))),
    "expand": (lambda x, y: (x[1:] + 1).expand(4) * y, (A(3.0, 7.0), torch.arange(4.0))),
    "cat": (lambda x, y: torch.cat([x[1:] * y, y]), (A(3.0, 7.0), torch.arange(5.0))),
    "where": (lambda x, y: torch.where(x[1:] > 0, y, -y), (A(3.0, 7.0), torch.arange(5.0))),
    "product": (lambda x, y: x[1:, None] * y[None], (A(3.0, 7.0), torch.arange(5.0))),
    "reduced": (lambda x, y: (x[1:] * y).sum() + x[1:].mean(), (A(3.0, 7.0), torch.arange(5.0))),
}


@pytest.mark.parametrize("fn, args", FIXED.values(), ids=list(FIXED))
def test_a_size_that_guards_fix(fn, args):
    compiled, before = vitrify.compile(fn, dynamic=True), dict(vitrify.counters)
    longer = (torch.cat([args[0]] * 3), args[1])
    with torch.no_grad():
        for given in (args, args):
            beside.same_call(beside.run(compiled, given), beside.run(fn, given), given, given)
        try:
            eager = fn(*longer)
        except RuntimeError:
            with pytest.raises(RuntimeError):
                compiled(*longer)
        else:
            torch.testing.assert_close(compiled(*longer), eager, rtol=0, atol=0)
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"]


MASKED = {
    "joined with itself": lambda x: (lambda v: torch.cat([v[v > 0], v.reshape(-1)]))(torch.div(x, 2, rounding_mode="trunc")),
    "squeezed in place before": lambda x: (x.squeeze_(), torch.cat([(x // 2)[x // 2 > 0], x // 2]))[1],
    "written before": lambda x: (x.add_(0), torch.cat([x[x > 0] * 2, x]))[1],
    "computed before": lambda x: (lambda v: torch.cat([v[v > 0], v, v[v > 0] + 1]))(x * 2),
    "and beside": lambda x: (lambda v: (torch.cat([v[v > 0], v + 1]), v.sum(), v * 3))(x * 2),
}


@pytest.mark.parametrize("fn", MASKED.values(), ids=list(MASKED))
def test_what_is_joined_with_a_found_part(fn):
    """The nest that writes behind the part of a size that a call finds was launched with what that call reads: the size was not known yet, and the call failed."""
    compiled, before = vitrify.compile(fn), dict(vitrify.counters)
    with torch.no_grad():
        for k in range(4):
            a = torch.arange(-4, 5 + k) + k
            b = a.clone()
            beside.same_call(beside.run(compiled, (a,)), beside.run(fn, (b,)), (a,), (b,))
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"]


SIZES_ONLY = {
    "a number": lambda m, x: x.sum() * len(x[m]),
    "in a product": lambda m, x: x[m].sum(0) * len(x[m]),
    "another way": lambda m, x: x + 1 if len(x[m]) > 5 else x - 1,
    "a loop": lambda m, x: torch.stack([r * 2 for r in x[m]]).sum(0),
    "parts": lambda m, x: torch.cat([r[None] * 2 for r in x[m].unbind()]),
    "a permutation": lambda m, x: torch.randperm(len(x[m])) * 2 + x.sum().long(),
    "draws": lambda m, x: torch.rand(len(x[m])) + 1,
    "dropout": lambda m, x: F.dropout(x[m], 0.5),
    "a diagonal": lambda m, x: (x[m] @ x[m].T).fill_diagonal_(9.0).amin(1),
    "a matrix of it": lambda m, x: torch.diag_embed(x[m][:, 0]) + 1,
    "some of it": lambda m, x: x[m][torch.multinomial(x[m][:, 0] + 1, 2)] * 2,
    "of the rest": lambda m, x: x[~m & (torch.arange(30) > 2)].sum() * x[~m].shape[0],
    "of integers": lambda m, x: x[m.long() * 3 > 0].sum() * x[m.long() * 3 > 0].shape[0],
}


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("fn", SIZES_ONLY.values(), ids=list(SIZES_ONLY))
def test_sizes_of_masked_arguments(fn, dynamic):
    """Nobody looked whether a later mask sets as many where only their number is of use, or where the program had made a number of it: values of another mask, and memory of others."""
    expects.eager("the content of an argument is not what the plan is for", "a size that follows from content is not what the plan is for", some=True)
    compiled, before = vitrify.compile(fn, dynamic=dynamic), dict(vitrify.counters)
    x = torch.arange(120.0).view(30, 4)
    with torch.no_grad():
        for n in (5, 6, 28, 5, 2, 9, 5):
            m = torch.arange(30) < n
            beside.same_call(beside.run(compiled, (m, x)), beside.run(fn, (m, x)), (m, x), (m, x))
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"]


def test_a_size_of_a_mask_beside_that_of_another_argument():
    """Masks whose content stays are not read again: what else the size was compared with changes all the same."""
    expects.eager("the content of an argument is not what the plan is for", "a size that follows from content is not what the plan is for", some=True)
    fn = lambda m, x, y: x[m] + y  # noqa: E731
    compiled, before = vitrify.compile(fn, dynamic=True), dict(vitrify.counters)
    m, x = torch.arange(30) < 5, torch.arange(120.0).view(30, 4)
    with torch.no_grad():
        for n in (5, 5, 6, 1, 5):
            given = (m, x, torch.arange(4.0 * n).view(n, 4))
            beside.same_call(beside.run(compiled, given), beside.run(fn, given), given, given)
    assert vitrify.counters["kernels_launched"] > before["kernels_launched"]


def padded(x):
    f = x[x > 0.4]
    e = 30 // f.shape[0] + 1
    return F.pad(f, (0, -f.shape[0] % e)).view(-1, e).shape[0] + x[:1] * 0


DIVIDED_BY = {
    "a square": lambda x: (lambda f: f.repeat(30 // (f.shape[0] ** 2) + 1).sum())(x[x > 0.4]), "a quotient": padded,
    "a product": lambda x: (lambda f: f.repeat(30 // f.numel() + 1)[:30] + 1)((x > 0.4).nonzero().repeat(1, 2).flatten()),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", DIVIDED_BY)
def test_guards_that_divide_by_a_found_size(name, dynamic):
    """They were asked of sizes that nobody knew yet, and divided by zero."""
    fn = DIVIDED_BY[name]
    compiled = vitrify.compile(fn, dynamic=dynamic)
    for n in (7, 11, 16, 7, 11):
        x = torch.rand(n, generator=torch.Generator().manual_seed(n))
        torch.testing.assert_close(compiled(x), fn(x))


INF = float("inf")
NORMS = {
    "of all": lambda x, p: torch.linalg.vector_norm(x[x > 0], p), "norm": lambda x, p: x[x > 0].norm(p), "of doubles": lambda x, p: torch.linalg.vector_norm(x[x > 0], p, dtype=torch.float64),
    "of columns": lambda x, p: torch.linalg.vector_norm(x[x[:, 0] > 0], p, 0), "norm of columns": lambda x, p: x[x[:, 0] > 0].norm(p, 0, True), "of rows": lambda x, p: torch.linalg.vector_norm(x[x[:, 0] > 0], p, 1),
    "of a list": lambda x, p: torch._foreach_norm([x[x > 0], x], p)[0], "total": lambda x, p: torch.nn.utils.get_total_norm([x[x > 0]], p), "dead": lambda x, p: (torch.linalg.vector_norm(x[x > 0], p), x * 2)[1],
}



@pytest.mark.sweep(3)
@pytest.mark.eager("a size that follows from content is not what the plan is for", some=True)
@pytest.mark.parametrize("p", [INF, -INF, -1.0, -1, -0.5, 0, 1, 2.0])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_nothing(name, p):
    """Some have no value there: eager raises."""
    told = []
    for f in (lambda x: NORMS[name](x, p), vitrify.compile(lambda x: NORMS[name](x, p))):
        told.append([])
        for x in (torch.ones(3, 2), -torch.ones(3, 2), torch.ones(3, 2), torch.zeros(2, 2), torch.ones(0, 2)):
            try:
                with torch.no_grad():
                    told[-1].append(f(x + torch.arange(2.0) * x))
            except RuntimeError as e:
                told[-1].append(str(e))
    for eager, ours in zip(*told, strict=True):
        assert type(eager) is type(ours)
        assert torch.is_tensor(eager) or eager == ours
        if torch.is_tensor(eager):
            torch.testing.assert_close(ours, eager)
