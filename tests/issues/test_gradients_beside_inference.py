"""A program that returns what it has made in inference mode, and takes gradients itself: the .grad that it set was an inference tensor too, to which nothing could be added."""
import expects
import pytest
import torch
import vitrify


@pytest.mark.parametrize("returns", ["inference", "both", "ordinary", "nothing"])
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode], ids=["called outside", "called in inference mode"])
@pytest.mark.parametrize("zeroed", [False, True])
def test_as_eager(zeroed, around, returns):
    if returns in ("inference", "both"):
        expects.eager("both inference tensors and others")
    else:
        expects.eager("it makes gradients that are there from the first call on")

    def told(compile):
        w, c, seen = torch.rand(3, generator=torch.Generator().manual_seed(0), requires_grad=True), torch.ones(3), []

        def program(x):
            with torch.inference_mode(False), torch.enable_grad():
                if zeroed:
                    w.grad = None
                y = (w * c).sin()
                y.sum().backward()
            with torch.inference_mode():
                v = x * 2
            return {"inference": v, "both": (v, y.detach()), "ordinary": y.detach(), "nothing": None}[returns]
        f = compile(program)
        for k in range(3):
            with around():
                out = f(torch.full((2, 3), 1.0 + k))
            seen.append(([t.is_inference() for t in (out if isinstance(out, tuple) else [out]) if t is not None], w.grad.is_inference(), w.grad.tolist()))
            if not zeroed:
                w.grad.add_(1)
        return seen
    ours, eager = told(vitrify.compile), told(lambda f: f)
    torch.testing.assert_close([s[2] for s in ours], [s[2] for s in eager])
    assert [s[:2] for s in ours] == [s[:2] for s in eager]
