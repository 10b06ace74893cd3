"""Refusing threads by writing threading.Thread.start took the version of every class of threads away: a program that reaches one was compiled again on every call."""

import threading

import torch

import vitrify


class Worker(threading.Thread):
    scale = 2.0


def test_a_class_of_threads_stays_valid():
    f = vitrify.compile(lambda x: x * Worker.scale)
    x = torch.ones(3)
    f(x)
    before = dict(vitrify.counters)
    torch.testing.assert_close(f(x), 2 * x)
    assert vitrify.counters["captures"] == before["captures"] and vitrify.counters["kernels_launched"] > before["kernels_launched"]
