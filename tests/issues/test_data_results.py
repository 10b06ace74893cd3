"""Results that are the .data of a tensor count their writes by themselves, those of detach() with their tensor: only of the latter do gradients hear."""
import pytest
import torch
import vitrify

pytestmark = pytest.mark.filterwarnings("error::vitrify.VitrifyWarning")


def of_result(x):
    y = x.sigmoid()
    return y, y.data


def of_argument(x):
    return x.sin() * x, x.data


def of_view(x):
    y = x.sigmoid()
    return y, y[1:].data


def view_of_data(x):
    y = x.sigmoid()
    return y, y.data[1:]


def of_hidden(x):
    y = x.exp()
    return y[1:], y.data[:1]


def detached(x):
    y = x.sigmoid()
    return y, y.detach()


def detached_data(x):
    y = x.sigmoid()
    return y, y.data.detach()


def outcome(f, x):
    y, d = f(x)
    d.mul_(2)
    try:
        gradient, = torch.autograd.grad(y.sum(), x)
    except RuntimeError as e:
        gradient = str(e).partition("which is")[0].partition(" is at")[0]
    return y.detach(), d, gradient, [t._version for t in (x, y, d)], d.is_leaf, d.requires_grad, d._base is None


@pytest.mark.parametrize("fn", [of_result, of_argument, of_view, view_of_data, of_hidden, detached, detached_data], ids=lambda f: f.__name__)
def test_writes_to_data(fn):
    """The version of its tensor grew, and the backward raised where eager has a gradient of what is there by then."""
    compiled = vitrify.compile(fn, fullgraph=True)
    for _ in range(2):
        ours, eager = (outcome(f, torch.linspace(-1, 1, 4, requires_grad=True)) for f in (compiled, fn))
        assert ours[3:] == eager[3:]
        for a, b in zip(ours[:3], eager[:3]):
            if isinstance(b, str):
                assert a == b
            else:
                torch.testing.assert_close(a, b)


def both(x):
    y = x * 2
    d = y.data
    return y, d, d[1:], y.data


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("written", range(4))
def test_views_of_data_count_with_it(written, trained):
    versions = []
    for f in (vitrify.compile(both, fullgraph=True), both):
        out = f(torch.ones(4, requires_grad=trained))
        with torch.no_grad():
            out[written].add_(1)
        versions.append([t._version for t in out])
    assert versions[0] == versions[1]
