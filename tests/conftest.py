"""For every test: a clean engine, fixed seeds, and no eager call or missing kernel that the test has not announced (tests/expects.py)."""
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

os.environ.setdefault("VITRIFY_VERIFY", "1")  # graphs and loops are verified after every stage, which takes no time that could be measured

import expects  # noqa: E402

if threading.current_thread() is threading.main_thread():  # a shell has what it starts in the background ignore Ctrl-C, which tests send
    signal.signal(signal.SIGINT, signal.default_int_handler)

_watch = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    seen = {}
    for item in items:
        if sweep := item.get_closest_marker("sweep"):
            every, = sweep.args
            number = seen[item.function] = seen.get(item.function, -1) + 1
            if (number + number // every) % every:  # another place of each row, not one column
                item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("serial") and not item.get_closest_marker("slow"):
            raise pytest.UsageError(f"{item.nodeid} is serial and not slow: ./x test runs serial tests with the slow ones only")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    item.stash[_watch] = expects.begin(item)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    result = yield
    expects.end(item.stash[_watch])
    return result


@pytest.fixture(autouse=True)
def _fresh():
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    torch.manual_seed(0)
    grad, threads, dtype = torch.is_grad_enabled(), torch.get_num_threads(), torch.get_default_dtype()
    yield
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    vitrify = sys.modules.get("vitrify")
    if vitrify is not None and hasattr(vitrify, "reset"):
        vitrify.reset()
