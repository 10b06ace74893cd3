"""What ATen's kernels give is known before the first run, or after one run that eager made."""
import pytest
import torch
import torch.nn.functional as F
import vitrify
from compare import compare


def bag(w, i, o, p):
    return F.embedding_bag(i, w, o, mode="sum", per_sample_weights=p)


def bag_of(**more):
    return lambda w, i, o, p: F.embedding_bag(i, w, o, **more)


WEIGHTS = torch.arange(50.0).reshape(10, 5)
BAGS = (WEIGHTS, torch.tensor([5, 1, 6, 5, 6]), torch.tensor([0, 3]), torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0]))
ROW = (torch.tensor([1.0, 1.0, 2.0, 3.0, 3.0]),)
TABLE = (torch.tensor([[1.0, 1.0, 2.0], [1.0, 1.0, 2.0], [0.0, 5.0, 5.0]]),)


@pytest.mark.parametrize("fn, sample", [
    *[(lambda x, inverse=inverse, counts=counts, dim=dim: torch.unique_consecutive(x, inverse, counts, dim), sample)
      for inverse in (False, True) for counts in (False, True) for dim, sample in ((None, ROW), (0, ROW), (-1, ROW), (0, TABLE), (1, TABLE))],
    (bag, BAGS), (bag_of(mode="mean"), BAGS), (bag_of(mode="max"), BAGS), (bag_of(mode="sum", include_last_offset=True), (*BAGS[:2], torch.tensor([0, 3, 5]), BAGS[3])),
])
@pytest.mark.compiled("ATen computes all of it")
def test_the_first_call_is_compiled(fn, sample):
    before = dict(vitrify.counters)
    with torch.no_grad():
        compare(fn, sample)
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    assert did["compiled_calls"] == 2 and did["eager_calls"] == did["fallbacks"] == 0
    assert did["externs_called"] > 0  # both are calls of ATen's


@pytest.mark.eager("aten::_batch_norm_with_update_functional: result 1 is bf16 [5] strides [1], recorded f32 [5] strides [1]")
def test_all_results_of_a_call_are_learned_at_once():
    """Several of them are not what the Meta kernel says, which is asked where there are too many elements to ask the kernel itself."""
    x = torch.randn(5, 5, 50000).bfloat16()
    more = [torch.rand(5).bfloat16() for _ in range(4)]
    compiled, before = vitrify.compile(lambda x, *more: torch.ops.aten._batch_norm_with_update(x, *more, 0.5, 0.6)), dict(vitrify.counters)
    with torch.no_grad():
        for _ in range(3):
            compiled(x, *[t.clone() for t in more])
    did = {k: v - before[k] for k, v in vitrify.counters.items()}
    assert did["eager_calls"] <= 1 and did["compiled_calls"] >= 2 and did["externs_called"] > 0
