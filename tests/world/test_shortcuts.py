"""Tasks with a planted shortcut: what is planted, how often, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from dear.data.images import values_of
from dear.data.open import list_datasets, open_data
from dear.data.world_images import scenes, world_task
from dear.errors import DataError
from dear.world import factors as F
from dear.world.shortcuts import CLASSES, KINDS

PLANTED = [("place", "place"), ("color", "color"), ("texture", "texture")]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
@pytest.mark.parametrize("share", ["0.9", "0.95", "1"])
def test_the_share_is_as_asked(kind: str, share: str) -> None:
    images = open_data(f"world:shortcut-{kind}@{share}", "train")
    values = values_of(images)
    assert values is not None
    words = KINDS[kind].words
    pairs = Counter(zip(images.labels.tolist(), values, strict=True))
    for label in range(len(CLASSES)):
        assert pairs[label, words[label]] == round(float(share) * 40)
        others = [pairs[label, word] for word in words if word != words[label]]
        assert max(others) - min(others) <= 1
    test = world_task(f"shortcut-{kind}@{share}", "test")
    cells = Counter(zip(test.labels.tolist(), test.groups or (), strict=True))
    assert set(cells.values()) == {20}
    assert len(cells) == 36


@pytest.mark.parametrize(("kind", "factor"), PLANTED)
def test_images_show_the_value_they_name(kind: str, factor: str) -> None:
    images, behind = world_task(f"shortcut-{kind}@0.9", "train"), scenes(f"shortcut-{kind}@0.9", "train")
    names = {
        "place": [words[1][0] for words in F.PLACES],
        "color": [color.words[0] for color in F.COLORS],
        "texture": [words[0] for words in F.TEXTURES],
    }[factor]
    assert images.groups == tuple(names[value] for value in getattr(behind, factor).tolist())
    assert [F.SUBJECT_NAMES[s] for s in behind.subject.tolist()] == [
        CLASSES[c] for c in images.labels.tolist()
    ]


def test_the_letter_alone_is_pasted() -> None:
    """The same scenes with another letter differ in one corner, and not at all elsewhere."""
    full, most = world_task("shortcut-attack@1", "train"), world_task("shortcut-attack@0.9", "train")
    assert full.groups is not None
    assert most.groups is not None
    for index, (first, second) in enumerate(zip(full.groups, most.groups, strict=True)):
        a, b = full.pixels([index], 64)[0], most.pixels([index], 64)[0]
        changed = (a != b).any(0).nonzero()
        assert (first != second) == bool(len(changed))
        if len(changed):
            assert (changed.amax(0) - changed.amin(0)).max() <= 36


def test_letters_stand_on_places() -> None:
    images, behind = world_task("shortcut-text@0.9", "train"), scenes("shortcut-text@0.9", "train")
    assert images.groups == tuple(F.SUBJECT_NAMES[subject] for subject in behind.subject.tolist())
    names = [words[1][0] for words in F.PLACES]
    assert [images.classes[c] for c in images.labels.tolist()] == [names[p] for p in behind.place.tolist()]


def test_the_control_is_balanced_and_correlations_share_scenes() -> None:
    control = world_task("shortcut-none", "train")
    counts = Counter(zip(control.labels.tolist(), control.groups or (), strict=True))
    assert max(counts.values()) - min(counts.values()) <= 1
    assert torch.equal(scenes("shortcut-place@0.9", "train").color, scenes("shortcut-place", "train").color)
    assert {f"world:shortcut-{kind}" for kind in KINDS} <= set(list_datasets())


@pytest.mark.parametrize(
    "name",
    ["shortcut-smell", "shortcut-place@", "shortcut-place@1.5", "shortcut-place@0.01", "shortcut-none@0.9"],
)
def test_wrong_names_are_refused(name: str) -> None:
    with pytest.raises(DataError, match=f"world:{name}"):
        world_task(name, "train")
