"""DeAR adapters in one pass: equal to each adapter alone, whatever its neighbors are."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from stacks import adapters, alone, dear_adapters
from tiny import images, mixed_roles, tiny_clip

from dear.clip.gpu import Recorder
from dear.methods import DeAR, build_method
from dear.serve import mixed_batch
from dear.serve.dear_stack import stack_key

OPTIONS = [
    {},
    dict(DeAR.preset("paper").options),
    dict(DeAR.preset("quick").options),
    {"early_tokens": 0},
    {"early_tokens": 0, "beta": 0.4, "first_layer": 5},
    {"early_tokens": 2, "token_start": "free"},
    {"early_tokens": 3, "first_layer": 4},
    {"center": 0.6},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_pass_equals_each_adapter_alone(options, monkeypatch) -> None:
    models = dear_adapters(**options)
    models = [*models, models[1], models[3]]
    pixels = images(len(models))
    expected = alone(models, pixels)
    monkeypatch.setattr(DeAR, "logits_from_frozen", None)  # no adapter may be computed on its own
    for one, alone_logits in zip(mixed_batch.logits(models, pixels), expected, strict=True):
        torch.testing.assert_close(one, alone_logits, rtol=1e-10, atol=1e-10)


def test_new_classes_are_scored_as_alone() -> None:
    models = dear_adapters(3)
    models[1] = models[1].with_classes(("dog", "a new one", "red cat", "another"))
    pixels = images(len(models))
    for one, alone_logits in zip(mixed_batch.logits(models, pixels), alone(models, pixels), strict=True):
        torch.testing.assert_close(one, alone_logits, rtol=1e-10, atol=1e-10)


def test_adapters_that_cannot_share_a_pass_have_other_keys() -> None:
    clip = tiny_clip()
    kinds = [dear_adapters(1, clip, **options)[0] for options in OPTIONS]
    kinds.append(build_method("dear", clip, ("a", "b"), roles=mixed_roles(seed=9)))  # other masks
    assert len({stack_key(model) for model in kinds}) == len(kinds)
    pixels = images(len(kinds))
    for one, alone_logits in zip(mixed_batch.logits(kinds, pixels), alone(kinds, pixels), strict=True):
        torch.testing.assert_close(one, alone_logits, rtol=1e-10, atol=1e-10)


def test_a_trained_adapter_is_seen_at_once() -> None:
    models = dear_adapters(2)
    pixels = images(2)
    mixed_batch.logits(models, pixels)
    with torch.no_grad():
        for p in models[0].parameters():
            p.mul_(1.5)
    for one, alone_logits in zip(mixed_batch.logits(models, pixels), alone(models, pixels), strict=True):
        torch.testing.assert_close(one, alone_logits, rtol=1e-10, atol=1e-10)


class FakeRecording:
    """Behaves as a CUDA graph does: fixed inputs and outputs, one size, one function."""

    made = 0

    def __init__(self, function, inputs) -> None:
        FakeRecording.made += 1
        self.function, self.places = function, [None if one is None else one.clone() for one in inputs]

    def __call__(self, inputs):
        for place, one in zip(self.places, inputs, strict=True):
            if one is not None:
                place[: len(one)].copy_(one)
        return self.function(*self.places)


def test_recorded_batches_give_the_same_answers() -> None:
    clip = tiny_clip()
    models = [*dear_adapters(3, clip), *adapters("linear-probe", clip, 2), *adapters("vpt", clip, 1)]
    pixels = images(len(models))
    expected = alone(models, pixels)
    recorder = Recorder(record=FakeRecording)
    FakeRecording.made = 0
    with torch.inference_mode():
        for order in ([0, 1, 2, 3, 4, 5], [2, 1, 0, 4, 3, 5], [1, 1, 2, 3, 3, 5], [0], [0], [0, 3], [0, 3]):
            answers = mixed_batch.logits([models[i] for i in order], pixels[order], run=recorder)
            for place, one in zip(order, answers, strict=True):
                torch.testing.assert_close(one, expected[place], rtol=1e-10, atol=1e-10)
    assert FakeRecording.made == len(recorder) > 0


def test_buckets_are_recorded_the_second_time_and_forgotten_in_turn() -> None:
    recorder = Recorder(buckets=(2, 4), limit=1, record=FakeRecording)
    FakeRecording.made = 0

    def double(x):
        return (2 * x,)

    with torch.no_grad():
        for rows, made in ((1, 0), (2, 1), (1, 1), (3, 1), (4, 2), (4, 2), (5, 2), (5, 2), (2, 3)):
            x = torch.randn(rows, 3)
            (doubled,) = recorder("double", double, x)
            assert torch.equal(doubled, 2 * x)
            assert FakeRecording.made == made
    assert len(recorder) == 1
    x = torch.randn(2, 3, requires_grad=True)
    assert recorder("double", double, x)[0].requires_grad  # gradients are never recorded


def test_a_cpu_records_nothing() -> None:
    recorder = Recorder()
    with torch.no_grad():
        for _ in range(3):
            recorder("same", lambda x: (x,), torch.zeros(2))
    assert len(recorder) == 0


def test_an_operation_that_cannot_be_recorded_runs_anyway(monkeypatch) -> None:
    def refuse(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("dear.clip.gpu.recorded.Recording", refuse)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    recorder = Recorder()
    monkeypatch.setattr(recorder, "_usable", lambda _: True)
    x = torch.ones(2)
    with torch.no_grad():
        recorder("double", lambda x: (2 * x,), x)
        with pytest.warns(UserWarning, match="unrecorded"):
            recorder("double", lambda x: (2 * x,), x)
        assert torch.equal(recorder("double", lambda x: (2 * x,), x)[0], 2 * x)


def test_a_recorder_is_not_copied_with_its_backbone() -> None:
    clip = tiny_clip()
    assert clip.recorder is clip.recorder
    assert copy.deepcopy(clip).recorder is not clip.recorder
    assert len(pickle.loads(pickle.dumps(clip.recorder))) == 0
