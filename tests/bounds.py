"""Every bound of a test that is looser than the rule (torch.testing.assert_close's own for a dtype, or twice eager's distance from fp64: compare.check_value), with its reason.

A test takes one by name: torch.testing.assert_close(a, b, **bounds.CURVE). tests/test_layers.py looks that no other file has a looser one of its own."""


class Bound(dict):
    """Keywords of assert_close."""

    def __init__(self, rtol, atol, cause):
        super().__init__(rtol=rtol, atol=atol)
        self.cause = cause


SUMS = Bound(1e-5, 1e-5, "sums of some hundred terms, added in another order than eager's: products, softmax, reductions")
MOMENTS = Bound(1e-4, 1e-6, "moments of numbers whose squares come near the largest: sums of squared distances, where ATen subtracts squares; atol is of the largest number")
SMALL_SUMS = Bound(3e-6, 3e-7, "as SUMS, of numbers below one")
OPTIONS = Bound(2e-5, 2e-6, "SUMS, where options choose between ways to add (fusion off, the interpreter, other targets)")
ATTENTION = Bound(1e-5, 2e-6, "softmax of attention by blocks, with a running maximum: each block is scaled anew")
ATTENTION_GRADIENTS = Bound(1e-4, 1e-5, "ATen's derivative of attention takes the logarithm of sums that ours has rounded otherwise")
DEEP = Bound(1e-5, 1e-6, "SUMS through several layers in a row, or several steps of training, each of which takes up the last one's rounding")
DEEP_CONVOLUTIONS = Bound(3e-5, 3e-5, "as DEEP for convolutions, whose sums have thousands of terms, and their gradients")
WEIGHTS = Bound(2e-4, 2e-4, "as DEEP_CONVOLUTIONS, with Winograd's transform and packed products among them: what is looked for is a stale weight, which is off by more than 1")
LAYOUT = Bound(1e-4, 1e-5, "gradients of convolutions in channels-last memory beside contiguous ones: oneDNN's other kernels round farther from fp64 (ARCHITECTURE.md)")
LAYOUT_TWICE = Bound(1e-5, 1e-5, "as LAYOUT, gradients of gradients")
WINOGRAD = Bound(3e-5, 3e-6, "Winograd's transform beside direct convolution, both ours: not beside eager")
SECOND_ORDER = Bound(2e-6, 2e-7, "SUMS in gradients of gradients")
LONG_SUMS = Bound(1e-5, 1e-5, "sums over up to 700 rows, in blocks by thread")
STEP_GRADIENTS = Bound(1e-5, 1e-7, "gradients of a small net after some steps of its optimizer: SUMS, of small numbers")
AUTOCAST = Bound(2e-2, 2e-2, "products in bfloat16, whose results have 8 bits: one rounding apart is 2 ** -8")
NET = Bound(4 * 1.3e-6, 1e-5, "a layer's SUMS in float32: four roundings of the rule's one")
HALF = Bound(0.014, 0.01, "two computations in bfloat16 under autocast, which round at other places: some of its 8 bits")
HALF_CURVE = Bound(0.01, 2e-4, "as HALF, after ten steps of training")
