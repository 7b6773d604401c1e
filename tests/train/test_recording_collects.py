"""A recording of an earlier training must not be freed while the next step is recorded."""

from __future__ import annotations

import gc
import weakref

import torch

from dear.methods.frozen import Loss
from dear.train import recording


class Old:
    """Something that only the garbage collector frees, as a training with its recording is."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected_before_a_step_is_recorded(monkeypatch) -> None:
    alive_while_recording = []

    class Recording:
        def __init__(self, *args: object, **kwargs: object) -> None:
            alive_while_recording.append(old() is not None)

    monkeypatch.setattr(recording, "Recording", Recording)
    gc.disable()
    try:
        learned = [torch.nn.Parameter(torch.ones(1))]
        old = weakref.ref(Old())
        recording.StepRecording(lambda inputs: Loss(learned[0].sum(), {}), [torch.ones(1)], learned)
    finally:
        gc.enable()
    assert alive_while_recording == [False]
