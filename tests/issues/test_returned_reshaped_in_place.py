"""A result that the program reshapes in place (unsqueeze_, t_) is a tensor of its own, and what shares its memory is a view of it: it came back as a view of a tensor
that nobody was given, which detach_() and writes that need gradients refused."""
import pytest
import torch
import vitrify

RESHAPE = {
    "unsqueeze_": lambda y: y.unsqueeze_(0), "last": lambda y: y.unsqueeze_(-1), "squeeze_": lambda y: y.squeeze_(1), "t_": lambda y: y.squeeze_(1).t_(), "transpose_": lambda y: y.transpose_(0, 2),
    "there and back": lambda y: y.transpose_(0, 2).transpose_(0, 2), "and written": lambda y: y.transpose_(0, 2).mul_(2),
}
OTHER = {
    "detach": lambda y: y.detach(), "data": lambda y: y.data, "row": lambda y: y[0], "view_as": lambda y: y.view_as(y), "chunk": lambda y: y.chunk(2, -1)[0], "transposed": lambda y: y.transpose(0, 1), "every second": lambda y: y[..., ::2],
    "as_strided": lambda y: y.as_strided((2,), (1,)), "bits": lambda y: y.view(torch.int32),
}


def told(f, mode):
    with mode():
        out = f(torch.arange(6.0).view(2, 1, 3))
    version = lambda t: 0 if t.is_inference() else t._version  # noqa: E731
    before = [version(t) for t in out]
    told = [(t.tolist(), t.stride(), t.storage_offset(), t._is_view(), t._base is None or (t._base.shape, [t._base is o for o in out])) for t in out]

    def tries(run):
        try:
            run()
        except RuntimeError as e:
            told.append(str(e)[:60])
    with torch.no_grad():
        tries(lambda: out[0].add_(1))
        tries(lambda: out[1].mul_(2))
    told += [(t.tolist(), version(t) - v) for t, v in zip(out, before)]
    for t in out:
        tries(t.detach_)
    tries(lambda: out[0].mul_(torch.ones(1, requires_grad=True)))
    return told + [t.requires_grad for t in out]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("reshape", RESHAPE)
def test_what_shares_its_memory(reshape, other, mode):
    for when in ("before", "after", "between"):
        for returned in (lambda y, a: (y, a), lambda y, a: (a, y, a[..., :1])):
            def f(x):
                y = x * 2
                if when == "before":  # noqa: B023
                    a = OTHER[other](y)
                RESHAPE[reshape](y)
                if when != "before":  # noqa: B023
                    a = OTHER[other](y)
                if when == "between":  # noqa: B023
                    y.transpose_(0, 1)
                return returned(y, a)  # noqa: B023
            try:
                theirs = told(f, mode)
            except (RuntimeError, IndexError):  # there is no such view
                continue
            compiled = vitrify.compile(f, fullgraph=True)
            assert told(compiled, mode) == theirs
            assert told(compiled, mode) == theirs
