"""The mode on torch's stack was a bare pointer to an object that Python had already freed: a crash once its memory was used again."""

import weakref

import torch

import vitrify
from vitrify import _door


def test_the_mode_lives_through_the_capture(monkeypatch):
    alive = []

    class Watched(_door._CaptureMode):
        def __init__(self):
            super().__init__()
            alive.append(weakref.ref(self))

    monkeypatch.setattr(_door, "_CaptureMode", Watched)
    seen, capture = [], _door.Door.capture

    def watching(self, *args):
        seen.append(alive[-1]() is not None)
        return capture(self, *args)

    monkeypatch.setattr(_door.Door, "capture", watching)
    x, launched = torch.randn(4), vitrify.counters["kernels_launched"]
    torch.testing.assert_close(vitrify.compile(lambda x: x * 2 + 1)(x), x * 2 + 1)
    assert seen == [True] and vitrify.counters["kernels_launched"] > launched
    assert alive[0]() is None, "and no longer"
