"""Networks that people run, unmodified: compiled beside eager beside fp64."""
import importlib.util
import sys
import warnings
from pathlib import Path

import compile_times
import expects
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import zoo  # noqa: E402

import vitrify  # noqa: E402
from vitrify import measure  # noqa: E402

PACKAGE = {"torchvision": "torchvision", "timm": "timm", "transformers": "transformers", "pyg": "torch_geometric"}
pytestmark = [pytest.mark.network, pytest.mark.filterwarnings("ignore")]


def params():
    for name, entry in zoo.ZOO.items():
        yield pytest.param(entry, id=name, marks=[] if entry.quick else [pytest.mark.slow])


@pytest.mark.parametrize("entry", params())
def test_network(entry):
    package = PACKAGE[entry.name.split("/")[0]]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, args, kwargs = entry.build()
    with torch.no_grad():
        eager = module(*args, **kwargs)
        compiled = vitrify.compile(module)
        with warnings.catch_warnings(record=True) as log:
            warnings.simplefilter("always")
            result = compiled(*args, **kwargs)
        did = measure.counted(lambda: compiled(*args, **kwargs))
        again = compiled(*args, **kwargs)
    assert type(result) is type(eager)
    for ours, theirs in zip(measure.tensors(result), measure.tensors(eager), strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
    reference = measure.double_run(module, args, kwargs)
    error_eager = measure.error(eager, reference)
    assert 0 < error_eager < 1e-3, "the network shows nothing"
    if entry.eagerly:
        reasons = [str(w.message) for w in log if issubclass(w.category, vitrify.VitrifyWarning)]
        assert len(reasons) == 1 and entry.eagerly in reasons[0], reasons
        expects.eager(entry.eagerly)
    else:
        assert did.get("kernels_launched", 0) > 0, f"no native kernel ran: {did}"
    for error in (measure.error(run, reference) for run in (result, again)):
        assert measure.within(error, error_eager), f"error {error:.3e} against fp64, eager's is {error_eager:.3e}"


@pytest.mark.slow
@pytest.mark.serial
def test_no_network_takes_long_to_compile_for_its_size():
    records = []
    for name, entry in zoo.ZOO.items():
        if entry.eagerly or importlib.util.find_spec(PACKAGE[name.split("/")[0]]) is None:
            continue
        torch.manual_seed(0)
        module, args, kwargs = entry.build()
        vitrify.reset()
        with torch.no_grad(), compile_times.Recorder() as record:
            vitrify.compile(module)(*args, **kwargs)
        records.append((name, record.values, record.seconds))
    print(compile_times.table(records))
    assert not compile_times.outliers(records)


@pytest.mark.no_kernels("nothing is compiled")
def test_the_zoo_is_wide():
    assert len([e for e in zoo.ZOO.values() if not e.eagerly]) >= 70
    assert {name.split("/")[0] for name in zoo.ZOO} == set(PACKAGE)
