"""A 0-d placeholder whose place in memory follows from sizes: an index into it, and a size of it, are eager's errors. The process died, and a size was read that is not there."""
import pytest
import torch
import vitrify

READS = {"last": "v[-1]", "second": "v[1]", "first": "v[0]", "size(0)": "v.size(0)", "size(-1)": "v.size(-1)", "stride(0)": "v.stride(0)", "shape[0]": "v.shape[0]", "unflatten": "v.unflatten(0, (1, -1))", "select": "v.select(0, 0)", "narrow": "v.narrow(0, 0, 1)",
         "unsqueeze": "v.unsqueeze(-1)", "sum": "v.sum(0)", "len": "len(v)", "chunk": "v.chunk(2)[0]", "numel": "v.numel()", "dim": "v.dim()"}
SCALARS = {"place": "x[x.shape[0] // 2]", "end": "x[-1]", "first": "x[0]", "squeezed": "x[m].squeeze()", "slice": "x[x.shape[0] - 1:].squeeze()", "made": "(x * 2)[-1]"}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("scalar", SCALARS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_reads(scalar, read, dynamic):
    scope = {}
    exec(f"def f(x, m):\n    v = {SCALARS[scalar]}\n    try:\n        r = {READS[read]}\n    except (IndexError, RuntimeError, TypeError) as e:\n        r = type(e).__name__\n    return v * 2, r", scope)
    f = scope["f"]

    def told(run):
        out = []
        for n in (5, 5, 7, 4):
            x, m = torch.arange(1.0, n + 1), torch.arange(n) == 1
            with torch.no_grad():
                v, r = run(x, m)
            out.append((v.tolist(), r.tolist() if isinstance(r, torch.Tensor) else r))
        return out
    before = vitrify.counters["kernels_launched"]
    assert told(vitrify.compile(f, dynamic=dynamic)) == told(f)
    assert vitrify.counters["kernels_launched"] > before
