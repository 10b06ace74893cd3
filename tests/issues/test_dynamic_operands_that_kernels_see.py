"""A library kernel that looks at how its operand lies gets it as recorded, also where one size changes from call to call: attention of a part of a convolution read
other memory, and numbers like such a part were drawn in another order."""
import bounds
import pytest
import torch
import torch.nn.functional as F
import vitrify

torch.manual_seed(1)
CONV, WIDE = torch.nn.Conv2d(8, 8, 3, 1, 1).requires_grad_(False), torch.nn.Conv2d(8, 12, 3, 1, 1).requires_grad_(False)


def attention(x):
    y = CONV(x)[:, :4]
    return F.scaled_dot_product_attention(y, y, y).sin()


def causal(x):
    y = CONV(x).relu()[:, :, 1:]
    return F.scaled_dot_product_attention(y, y, y, is_causal=True).sin()


def parts(x):
    q, k, v = WIDE(x).chunk(3, 1)
    return F.scaled_dot_product_attention(q, k, v).sin()


def cross_covariance(x):
    q, k, v = WIDE(x).reshape(x.shape[0], 3, 2, 2, 36).unbind(1)
    return F.scaled_dot_product_attention(q, k, v).sin()


def complex_view(x):
    return torch.view_as_complex(CONV(x)[:, :4].unflatten(-1, (3, 2))).abs().sin()


def drawn_like_a_part(x):
    return torch.randn_like((x * 2).transpose(1, 2)[:, :4]) + 1


def drawn_like_a_convolution(x):
    mean, logvar = CONV(x).chunk(2, 1)
    return mean + torch.randn_like(mean) * logvar.exp()


def integers(x):
    return torch.randint_like((x * 2).transpose(1, 2)[:, :4], 9) + 1


def doubles(x):
    return torch.rand_like((x * 2).transpose(1, 3)[:, 1:4], dtype=torch.float64) * 2


@pytest.mark.parametrize("how", ["static", "later", "marked", "dynamic"])
@pytest.mark.parametrize("f", [attention, causal, parts, cross_covariance, complex_view, drawn_like_a_part, drawn_like_a_convolution, integers, doubles])
def test_operands_lie_as_in_eager(f, how):
    compiled = vitrify.compile(f, dynamic={"static": False, "dynamic": True}.get(how))
    for batch in (2, 3, 4, 3):
        found = []
        for g in (compiled, f):
            torch.manual_seed(batch)
            x = torch.randn(batch, 8, 6, 6)
            if how == "marked" and g is compiled:
                vitrify.mark_dynamic(x, 0)
            with torch.no_grad():
                found.append((g(x), torch.get_rng_state()))
        (ours, here), (eager, there) = found
        torch.testing.assert_close(ours, eager, **bounds.ATTENTION)
        assert torch.equal(here, there)
        assert ours.stride() == eager.stride()
