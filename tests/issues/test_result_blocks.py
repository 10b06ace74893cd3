"""A product's result of some MiB came from malloc: small blocks were carved out of what it had left, the next lay at the heap's end, and the peak of
memory grew from call to call. Such results of inference have blocks of their own, used again."""
import bounds
import expects
import pytest
import torch
import vitrify
from vitrify import measure


@pytest.mark.parametrize("gemm", ["auto", "aten", "onednn", "mkl", "vitrify"])
@pytest.mark.parametrize("relu", [False, True], ids=["product", "kernel"])
def test_a_large_result_has_the_place_of_the_last(gemm, relu):
    expects.compiled("a product, with its relu, is one call of a library")
    if gemm == "vitrify" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("products of our own are for AVX-512")
    torch.manual_seed(0)
    m = torch.nn.Linear(64, 32768)
    f = (lambda x: m(x).relu()) if relu else m
    x = torch.randn(64, 64)
    c = vitrify.compile(f, options={"gemm": gemm})
    with torch.no_grad():
        places, small = set(), []
        for _ in range(4):
            y = c(x)
            places.add(y.data_ptr())
            assert y.data_ptr() % (2 << 20) == 0  # a block's address
            del y
            small.append([torch.empty(n) for n in (10, 1000, 100000)])  # what malloc would put in between
        first = c(x)
        did = measure.counted(lambda: places.add(c(x).data_ptr()))
    assert len(places) == 2  # the second only for what was kept
    assert did["externs_called"] + did["kernels_launched"] > 0 and did["eager_calls"] == 0
    torch.testing.assert_close(first, f(x).detach(), **bounds.SUMS)
    first.resize_(2 * first.numel())  # an ordinary tensor
