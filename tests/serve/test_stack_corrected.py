"""Adapters on corrections of one backbone: they share its work, and each answers as it does alone."""

from __future__ import annotations

import pytest
import torch
from stacks import alone, dear_adapters
from tiny import images, mixed_roles, tiny_clip

from dear.clip.correction import Correction
from dear.clip.gpu import Recorder, run_eagerly
from dear.methods import DeAR, build_method
from dear.serve import mixed_batch


def correction(seed: int, width: int, heads: tuple[tuple[int, int], ...] = ()) -> Correction:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.eye(width) + 0.3 * torch.randn(width, width, generator=generator)
    return Correction(matrix, 0.1 * torch.randn(width, generator=generator), heads)


def backbones(clip, left_out: bool = True) -> list:
    """The backbone itself, two affine corrections of it, and two that leave out heads."""
    width, last = clip.config.embed_dim, clip.config.vision.layers
    results = [clip, clip.with_correction(correction(1, width)), clip.with_correction(correction(2, width))]
    if left_out:
        heads = ((last, 1), (last - 1, 0))
        results += [clip.with_correction(correction(seed, width, heads)) for seed in (3, 4)]
    return results


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"early_tokens": 2, "token_start": "class"},
        {"early_tokens": 0},
    ],
    ids=str,
)
def test_dear_on_several_corrections_is_computed_in_one_pass(options, monkeypatch) -> None:
    models = [model for clip in backbones(tiny_clip()) for model in dear_adapters(2, clip, **options)]
    models[3] = models[3].with_classes(("dog", "a new one", "red cat"))
    models = [*models, models[2], models[9]]
    pixels = images(len(models))
    expected = alone(models, pixels)
    monkeypatch.setattr(DeAR, "logits_from_frozen", None)  # no adapter may be computed on its own
    for run in (None, Recorder(record=lambda function, inputs: lambda patches: function(*patches))):
        results = mixed_batch.logits(models, pixels, *([] if run is None else [run]))
        for one, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(one, reference, rtol=1e-9, atol=1e-9)


def test_the_layers_before_the_first_change_run_once_for_all_corrections(monkeypatch) -> None:
    clip = tiny_clip()
    clips = backbones(clip)
    methods = [dear_adapters(1, one)[0] for one in clips]
    methods += [build_method("zeroshot", one, ("dog", "sea")) for one in clips[:3]]
    pixels = images(len(methods))
    expected = alone(methods, pixels)
    seen: list[int] = []
    embed = type(clip.visual).embed
    monkeypatch.setattr(
        type(clip.visual), "embed", lambda tower, patches: seen.append(len(patches)) or embed(tower, patches)
    )
    results = mixed_batch.logits(methods, pixels)
    assert sorted(seen) == [3, 5]  # one pass for the prefix, one for the feature
    for one, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(one, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["zeroshot", "coop", "linear-probe", "tip-adapter", "vpt", "maple", "mmrl", "prolip"]
)
def test_other_methods_answer_as_alone(name) -> None:
    methods = []
    for seed, clip in enumerate(backbones(tiny_clip(), left_out=name != "mmrl")):
        method = build_method(name, clip, ("dog", "red cat", "sea"), seed=seed)
        with torch.no_grad():
            for p in method.parameters():
                p.add_(
                    torch.randn(p.shape, generator=torch.Generator().manual_seed(seed), dtype=p.dtype) * 0.2
                )
        methods += [method, method]
    pixels = images(len(methods))
    for one, reference in zip(mixed_batch.logits(methods, pixels), alone(methods, pixels), strict=True):
        torch.testing.assert_close(one, reference, rtol=1e-9, atol=1e-9)


def test_corrections_keep_one_copy_of_the_weights_in_another_precision() -> None:
    clip = tiny_clip(dtype=torch.float32)
    width = clip.config.embed_dim
    clips = [clip.with_correction(correction(seed, width)) for seed in range(4)]
    assert (
        clip.with_correction(correction(2, width)) is clips[2]
    )  # runs with one correction are on one object
    assert clips[1].with_correction(None).correction is None
    methods = [
        build_method("dear", one, ("dog", "sea"), roles=mixed_roles()).in_precision("bfloat16")
        for one in clips
    ]
    weights = {p.data_ptr() for method in methods for p in method.clip.parameters()}
    assert weights == {p.data_ptr() for p in clip.cast(torch.bfloat16).parameters()}
    assert methods[1].clip.correction is clips[1].correction
    assert methods[1].clip.fingerprint == clip.fingerprint


@pytest.mark.parametrize(
    "run", [run_eagerly, Recorder(record=lambda function, _: lambda patches: function(*patches))]
)
def test_frozen_features_beside_the_logits_take_no_second_pass(run, monkeypatch) -> None:
    clips = backbones(tiny_clip())
    methods = [model for clip in clips for model in dear_adapters(2, clip)]
    names = ("zeroshot", "coop", "clip-adapter", "vpt", "prolip")
    methods += [build_method(name, clip, ("dog", "sea")) for name in names for clip in clips]
    methods += [build_method("dear", clips[1], ("dog", "sea"), roles=mixed_roles(), focus=((6, 0),))]
    pixels, selected = images(len(methods)), set(range(0, len(methods), 2))
    logits = alone(methods, pixels)
    features = {n: methods[n].clip.encode_image(pixels[n : n + 1])[0] for n in selected}
    seen: list[int] = []
    embed = type(clips[0].visual).embed
    monkeypatch.setattr(
        type(clips[0].visual),
        "embed",
        lambda tower, patches: seen.append(len(patches)) or embed(tower, patches),
    )
    members = [mixed_batch.Member(method) for method in methods]
    results, more = mixed_batch.logits_and_features(members, pixels, selected, run=run)
    assert sum(seen) == len(methods)
    assert set(more) == selected
    for one, reference in zip(results, logits, strict=True):
        torch.testing.assert_close(one, reference, rtol=1e-9, atol=1e-9)
    for place, reference in features.items():
        torch.testing.assert_close(more[place], reference, rtol=1e-9, atol=1e-9)
