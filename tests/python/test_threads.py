import gc
import threading

import bounds
import torch
import vitrify
from torch import nn


def make_net(width):
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 8), nn.Softmax(-1)).eval()


def in_threads(n, body):
    """Runs body(i) in n threads that start together; raises the first exception of any."""
    start, errors = threading.Barrier(n), []

    def run(i):
        try:
            start.wait()
            with torch.no_grad():
                body(i)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096


def test_one_model_called_by_100_threads(delta, no_warnings):
    net = make_net(32)
    fast = vitrify.compile(net)

    def calls(n):
        def body(i):
            x = torch.full((4, 16), 0.01 * i)
            want = net(x)
            for _ in range(n):
                torch.testing.assert_close(fast(x), want, **bounds.SMALL_SUMS)

        return body

    in_threads(100, calls(3))
    assert delta.captures == 1  # all of them asked at once
    in_threads(100, calls(5))
    gc.collect()
    before = resident_bytes()
    for _ in range(4):
        in_threads(100, calls(5))
    gc.collect()
    assert resident_bytes() < before + (64 << 20)
    assert delta.captures == 1


def test_16_models_compiled_at_once(delta, no_warnings):
    def body(i):
        net = make_net(16 + i)
        fast = vitrify.compile(net)
        x = torch.full((3, 16), 0.1)
        for _ in range(3):
            torch.testing.assert_close(fast(x), net(x), **bounds.SMALL_SUMS)

    in_threads(16, body)
    assert delta.captures == 16


def test_one_function_compiled_for_many_signatures_at_once(no_warnings):
    @vitrify.compile
    def f(x, scale):
        return (x * scale).softmax(-1) + x.sum()

    def body(i):
        for k in range(4):
            x, scale = torch.full((2, 3 + (i + k) % 4), 0.1 * i), 1.5 if i % 2 else 2.5
            torch.testing.assert_close(f(x, scale), (x * scale).softmax(-1) + x.sum(), **bounds.SMALL_SUMS)

    in_threads(16, body)
