"""Every method honors a correction of the image feature, and a run folder keeps it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from every_method import NAMES, NOVEL, build, pixels
from tiny import Colors, tiny_clip

from dear.clip import Clip
from dear.clip.correction import Correction
from dear.errors import RunError, UsageError
from dear.methods import METHODS, Method
from dear.methods.frozen import Frozen
from dear.methods.tensors import scores
from dear.runs.folder import load_run
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.train.run import train


def task() -> Colors:
    return Colors(domains=2)


def fitted(name: str, clip: Clip | None = None) -> Method:
    model = build(name, clip)
    train(model, task(), Recipe.of(model, epochs=1, batch=6, lr=5e-3, optimizer="adamw"))
    return model


def corrected(heads: tuple[tuple[int, int], ...] = (), blind: bool = False) -> Clip:
    """The tiny CLIP with a random correction; `blind` leaves nothing of the image."""
    generator = torch.Generator().manual_seed(9)
    matrix = torch.eye(20) + 0.3 * torch.randn(20, 20, generator=generator)
    bias = torch.randn(20, generator=generator)
    return tiny_clip(dtype=torch.float32).with_correction(
        Correction(matrix * (0.0 if blind else 1.0), bias, heads, "Color by words (3 directions)")
    )


@pytest.mark.parametrize("name", METHODS)
def test_what_is_removed_cannot_be_used(name: str) -> None:
    """When the correction leaves nothing, every image gets the same answer, before and after training."""
    model = fitted(name, corrected(((5, 1), (6, 2)), blind=True))
    for logits in model.all_logits(pixels()).values():
        assert (logits - logits[:1]).abs().max() < 1e-4
    corrected_method = fitted(name, corrected(((5, 1), (6, 2))))
    for logits in corrected_method.all_logits(pixels()).values():
        assert (logits - logits[:1]).abs().max() > 1e-3
    if corrected_method.open_classes:
        other = corrected_method.with_classes(NOVEL)
        assert other.clip.correction is corrected_method.clip.correction


@pytest.mark.parametrize("name", ["linear-probe", "zeroshot"])
def test_before_is_the_backbone_without_the_correction(name: str) -> None:
    before = Model(build(name, corrected(((5, 1),)))).zero_shot()
    assert before.clip.correction is None
    plain = Model(build("zeroshot", tiny_clip(dtype=torch.float32)))
    torch.testing.assert_close(before.forward(pixels()), plain.forward(pixels()))


@pytest.mark.parametrize("name", ["clip-lora", "zeroshot"])
def test_an_untrained_method_is_the_corrected_backbone(name: str) -> None:
    clip = corrected(((4, 1), (5, 0), (6, 2)))
    model = build(name, clip)
    expected = scores(clip, clip.encode_image(pixels()), model.prompts.frozen)
    assert torch.allclose(model.logits(pixels()), expected, atol=1e-4)
    plain = scores(clip, clip.with_correction(None).encode_image(pixels()), model.prompts.frozen)
    assert not torch.allclose(model.logits(pixels()), plain, atol=1e-2)


@pytest.mark.parametrize("name", ["zeroshot", "clip-lora", "purify", "skip-tuning", "prolip"])
def test_folding_into_a_plain_clip(name: str) -> None:
    model = fitted(name, corrected())
    plain = model.merge()
    assert plain.correction is None
    assert torch.allclose(
        scores(plain, plain.encode_image(pixels()), model.texts()), model.logits(pixels()), atol=1e-3
    )
    with pytest.raises(UsageError, match="heads"):
        build(name, corrected(((4, 1),))).merge()


@pytest.mark.parametrize("name", ["dear", "mmrl", "mmrlpp"])
def test_a_learned_projection_reads_the_corrected_feature_alone(name: str) -> None:
    """A correction that leaves one direction leaves one in what the projection reads, whatever it learned."""
    generator = torch.Generator().manual_seed(3)
    line = torch.outer(torch.randn(20, generator=generator), torch.randn(20, generator=generator))
    clip = tiny_clip(dtype=torch.float32).with_correction(
        Correction(line, torch.randn(20, generator=generator))
    )
    model, read = build(name, clip), []
    if name == "dear":
        with torch.no_grad():
            model.p_attr.copy_(torch.randn(model.p_attr.shape, generator=generator))
        read.append(model.attribute_features(pixels()))
    else:
        project = model.project_mean
        model.project_mean = lambda x: read.append(x.detach()) or project(x)
        model.logits(pixels())
    rows = read[0].flatten(0, -2).double()
    assert torch.linalg.matrix_rank(rows - rows.mean(dim=0), rtol=1e-4) == 1


def test_what_carries_a_corrected_feature() -> None:
    clip = corrected()
    visual, generator = clip.visual, torch.Generator().manual_seed(4)
    pooled = torch.randn(5, visual.config.width, generator=generator)
    carried = visual.correct_pooled(pooled)
    assert torch.allclose(
        visual.project_pooled(carried), visual.correct(visual.project_pooled(pooled)), atol=1e-4
    )
    hidden = torch.linalg.svd(visual.projection_matrix())[0][:, 20:]  # what the projection does not see
    assert hidden.shape[1] > 0
    assert torch.allclose(visual.correct_pooled(pooled + 3 * hidden[:, 0]), carried, atol=1e-4)
    plain = clip.plain.visual
    assert plain.correct_pooled(pooled) is pooled


def test_prolip_reads_the_corrected_feature_alone() -> None:
    model = fitted("prolip", corrected())
    hidden = torch.linalg.svd(model.clip.visual.projection_matrix())[0][:, 20]
    pooled = model.inference_stage(pixels()).x
    with torch.no_grad():
        model.projection += torch.randn(model.projection.shape, generator=torch.Generator().manual_seed(1))
        one, other = (
            model.logits_from_frozen(Frozen(y))[model.modes[0]] for y in (pooled, pooled + 3 * hidden)
        )
    assert torch.allclose(one, other, atol=1e-2)


def test_heads_before_the_first_layer_are_refused_before_training() -> None:
    clip = corrected(((1, 1),))
    with pytest.raises(UsageError, match="layer 1"):
        build("dear", clip).logits(pixels())


@pytest.mark.parametrize("name", ["linear-probe", "dear", "tip-adapter"])
def test_a_run_folder_keeps_it(name: str, tmp_path: Path) -> None:
    model = build(name, corrected(((5, 1), (6, 2))))
    train(model, task(), Recipe.of(model, epochs=1, batch=6), tmp_path / "run")
    plain = tiny_clip(dtype=torch.float32)
    loaded = load_run(tmp_path / "run", backbone=plain)
    assert loaded.clip.correction is not None
    assert loaded.clip.correction.note == "Color by words (3 directions)"
    assert plain.correction is None
    assert torch.allclose(loaded.logits(pixels()), model.logits(pixels()), atol=1e-5)
    # Resuming asks for the same correction.
    other = build(name, plain)
    with pytest.raises(RunError, match=re.escape(str(tmp_path / "run"))):
        train(other, task(), Recipe.of(other, epochs=1, batch=6), tmp_path / "run", resume=True)
    # Another file in its place is told.
    file = tmp_path / "run" / "correction.safetensors"
    Path(file).write_bytes(Path(tmp_path / "run" / "adapter.safetensors").read_bytes())
    with pytest.raises(RunError, match=r"correction\.safetensors"):
        load_run(tmp_path / "run", backbone=plain)


def test_worst_group_is_counted(tmp_path: Path) -> None:
    class Grouped:
        groups = tuple("ab"[index % 2] for index in range(12))

        def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
            return getattr(images, name)

        def __len__(self) -> int:
            return len(images)

    images = task()
    evaluation = Model(fitted("linear-probe")).evaluate(Grouped())  # type: ignore[arg-type]
    right = (evaluation.answers["default"] == evaluation.labels).tolist()
    groups = {
        f"{NAMES[label]}, {'ab'[value]}": [
            hit for i, hit in enumerate(right) if evaluation.labels[i] == label and i % 2 == value
        ]
        for label in range(3)
        for value in range(2)
    }
    expected = {name: sum(hits) / len(hits) for name, hits in groups.items()}
    assert evaluation.per_group() == expected
    assert evaluation.to_dict()["worst_group"]["accuracy"] == min(expected.values())
    assert "worst_group" not in Model(fitted("linear-probe")).evaluate(Plain()).to_dict()


class Plain:
    """A set that knows no groups."""

    def __init__(self) -> None:
        self._own = task()
        self._own.domains = None

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        return getattr(self._own, name)

    def __len__(self) -> int:
        return len(self._own)
