"""Measuring: interleaved medians, errors against an fp64 run, what a call launched."""
from __future__ import annotations

import copy
import platform
import statistics
import time
from typing import Callable, Mapping

import torch


def tensors(value) -> list[torch.Tensor]:
    """The tensors of a result, in order, through tuples, lists, dicts and dataclass-like outputs."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [t for item in value for t in tensors(item)]


def to_double(value):
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(to_double(v) for v in value)
    if isinstance(value, dict):
        return {k: to_double(v) for k, v in value.items()}
    return value


def double_run(module, args=(), kwargs=None):
    """What `module` computes in fp64: the reference that both eager's error and ours are taken against."""
    wide = copy.deepcopy(module).double() if isinstance(module, torch.nn.Module) else module
    with torch.no_grad():
        return wide(*to_double(tuple(args)), **to_double(kwargs or {}))


def error(result, reference) -> float:
    """Largest difference of any tensor of the result, over the largest value of that tensor's reference. Not equal in NaN, shape or integers: infinite."""
    ours, theirs = tensors(result), tensors(reference)
    if len(ours) != len(theirs):
        return float("inf")
    worst = 0.0
    for a, b in zip(ours, theirs):
        if a.shape != b.shape:
            return float("inf")
        if a.numel() == 0:
            continue
        if not a.is_floating_point():
            if not torch.equal(a, b.to(a.dtype)):
                return float("inf")
            continue
        a, b = a.detach().double(), b.detach().double()
        same = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(same, torch.zeros_like(a), (a - b).abs())
        if difference.isnan().any():
            return float("inf")
        finite = torch.where(b.isfinite(), b.abs(), torch.zeros_like(b)).max().item()
        worst = max(worst, difference.max().item() / (finite or 1.0))
    return worst


def within(error_ours: float, error_eager: float, dtype=torch.float32) -> bool:
    """The accuracy rule: at most twice eager's error (three times in half precision), with a floor of two roundings for results eager got exactly."""
    factor = 3 if dtype in (torch.float16, torch.bfloat16) else 2
    return error_ours <= factor * error_eager + 2 * torch.finfo(dtype).eps


def once(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def interleave(fns: Mapping[str, Callable[[], object]], seconds: float = 2.0, rounds: int = 11) -> dict[str, list[float]]:
    """Seconds per call of each, taken in turns so that a change in the machine's load meets all of them. Warm each up before."""
    inner = {name: max(1, int(0.002 / max(once(fn), 1e-8))) for name, fn in fns.items()}
    samples: dict[str, list[float]] = {name: [] for name in fns}
    end = time.perf_counter() + seconds
    order = list(fns)
    while len(samples[order[0]]) < rounds or time.perf_counter() < end:
        for name in order:
            fn, n = fns[name], inner[name]
            start = time.perf_counter()
            for _ in range(n):
                fn()
            samples[name].append((time.perf_counter() - start) / n)
        order.reverse()
    return samples


def medians(samples: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def counted(fn: Callable[[], object]) -> dict[str, int]:
    """What the engine's counters say that one call did."""
    import vitrify
    before = dict(vitrify.counters)
    fn()
    return {name: value - before.get(name, 0) for name, value in dict(vitrify.counters).items()}


def machine() -> dict:
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as info:
            model = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), model)
    except OSError:
        pass
    return {"cpu": model, "threads": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version(), "system": platform.system()}


def copy_bandwidth(megabytes: int = 256) -> float:
    """GB/s (read plus written) of a copy that no cache holds: what a kernel bound by memory can reach here."""
    source = torch.ones(megabytes * 2**20 // 4)
    target = torch.empty_like(source)
    target.copy_(source)
    best = min(once(lambda: target.copy_(source)) for _ in range(9))
    return 2 * source.numel() * 4 / best / 1e9
