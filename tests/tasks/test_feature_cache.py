"""Cached features and answers: the same numbers as without, found again, never stale, within a limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import Colors, images, mixed_roles, tiny_clip

from dear.clip import Clip
from dear.data import open_data
from dear.errors import UsageError
from dear.images import views as image_file
from dear.methods import METHODS, build_method, find_method
from dear.runs.feature_cache import FeatureCache
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.shortcuts.edited_images import EditedImages
from dear.tasks.adapt import adapt
from dear.tasks.evaluate import evaluate
from dear.tasks.retrieve import gallery_features
from dear.train.feed import Feed
from dear.train.frozen import views_for
from dear.train.run import train
from dear.utils.feature_store import FeatureStore

CLIP = tiny_clip(dtype=torch.float32)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEAR_CACHE", str(tmp_path / "cache"))
    colors = Colors(each=5)
    for i, label in enumerate(colors.labels.tolist()):
        path = tmp_path / "photos" / colors.classes[label] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        colors.image(i).save(path)
    return tmp_path / "photos"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found: list[object] = []
    before = image_file.open_pixels

    def counted(source: object, **options: object) -> np.ndarray:
        found.append(source)
        return before(source, **options)

    monkeypatch.setattr(image_file, "open_pixels", counted)
    return found


@pytest.mark.parametrize("name", list(METHODS))
def test_the_flag_of_a_method_is_true(name: str) -> None:
    """`cut` says exactly whether the frozen stage is the image feature and nothing else."""
    clip = tiny_clip()
    roles = mixed_roles() if METHODS[name].uses_roles else None
    method = build_method(name, clip, ("red", "green", "blue"), roles=roles)
    pixels = images(2)
    with torch.no_grad():
        stage = method.frozen_stage(pixels)
        feature = clip.encode_image(pixels)
    alike = stage[1:] == (None,) * 3 and stage.x.shape == feature.shape and torch.allclose(stage.x, feature)
    assert (method.cut == "feature") == (METHODS[name].cut == "feature") == alike


@pytest.mark.parametrize("name", ["zeroshot", "linear-probe"])
def test_answers_are_those_without_a_cache_and_the_second_time_no_image_is_opened(
    name: str, photos: Path, opened: list[object]
) -> None:
    method = adapt(photos, backbone=CLIP, method=name, recipe={"epochs": 1}, calibrate=False).method
    plain = Model(method).evaluate(open_data(photos, "all"), cached=False)
    opened.clear()
    first = evaluate(method, photos, split="all")
    again = evaluate(method, photos, split="all")
    for found in (first, again):
        for mode in method.modes:
            assert found.answers[mode].tolist() == plain.answers[mode].tolist()
            torch.testing.assert_close(found.confidence[mode], plain.confidence[mode], atol=1e-5, rtol=0)
    count = len(open_data(photos, "all"))
    assert len(opened) <= count
    opened.clear()
    evaluate(method, photos, split="all")
    files = [str(path) for path in sorted(photos.glob("*/*.png"))]
    Model(method).probabilities(files)
    Model(method).answers(files)
    assert opened == []


def test_a_changed_file_is_read_again(photos: Path, opened: list[object]) -> None:
    method = adapt(photos, backbone=CLIP, method="zeroshot", calibrate=False).method
    evaluate(method, photos, split="all")
    opened.clear()
    Image.new("RGB", (24, 24), (1, 2, 3)).save(photos / "red" / "0.png")
    found = evaluate(method, photos, split="all")
    assert len(opened) == 1
    plain = Model(method).evaluate(open_data(photos, "all"), cached=False)
    torch.testing.assert_close(found.confidence["default"], plain.confidence["default"], atol=1e-5, rtol=0)


def test_another_training_is_another_answer(photos: Path) -> None:
    settings = {"backbone": CLIP, "roles": mixed_roles(), "recipe": {"epochs": 2, "batch": 4, "lr": 2e-2}}
    one, two = (adapt(photos, seed=seed, **settings).method for seed in (1, 2))
    evaluate(one, photos, split="all")
    found = evaluate(two, photos, split="all").confidence["fused"]
    plain = Model(two).evaluate(open_data(photos, "all"), cached=False).confidence["fused"]
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=0)


def other_backbones() -> dict[str, Clip]:
    """Backbones with the same visual weights that give other answers."""
    vision = replace(CLIP.config, vision=replace(CLIP.config.vision, activation="gelu"))
    found = {"architecture": Clip(vision), "preprocessing": Clip(replace(CLIP.config, mean=(0.1, 0.2, 0.3)))}
    found |= {"text tower": Clip(CLIP.config), "temperature": Clip(CLIP.config)}
    for clip in found.values():
        clip.load_state_dict(CLIP.state_dict())
    with torch.no_grad():
        found["text tower"].text.tokens.mul_(1.5)
        found["temperature"].log_scale.sub_(2)
    return found


@pytest.mark.parametrize("what", ["architecture", "preprocessing", "text tower", "temperature"])
def test_another_backbone_with_the_same_visual_weights_gets_its_own_answers(what: str, photos: Path) -> None:
    images = open_data(photos, "all")
    one, two = (build_method("zeroshot", clip, images.classes) for clip in (CLIP, other_backbones()[what]))
    first, found = (Model(method).evaluate(images).confidence["default"] for method in (one, two))
    plain = Model(two).evaluate(images, cached=False).confidence["default"]
    assert not torch.allclose(first, plain, atol=1e-4)
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=0)


def test_edited_copies_of_files_have_their_own_answers(photos: Path) -> None:
    images = open_data(photos, "all")
    model = Model(build_method("zeroshot", CLIP, images.classes))
    known = model.logits(images)["default"]
    edited = EditedImages(images, "brightness", seed=1)
    found, plain = (model.logits(edited, cached=cached)["default"] for cached in (True, False))
    torch.testing.assert_close(found, plain)
    assert not torch.allclose(found, known)


def test_galleries_are_remembered(photos: Path, opened: list[object]) -> None:
    model = adapt(photos, backbone=CLIP, roles=mixed_roles(), recipe={"epochs": 1}, calibrate=False).method
    gallery = open_data(photos, "all")
    opened.clear()
    first = gallery_features(model, gallery)
    assert len(opened) == len(gallery)
    again = gallery_features(model, gallery)
    assert len(opened) == len(gallery)
    torch.testing.assert_close(again, first)


def test_training_on_known_features_is_training_on_the_plain_views(photos: Path) -> None:
    """The oracle runs the image tower in every step."""
    files = open_data(photos, "train")
    recipe = {"augment": False, "epochs": 3, "batch": 4, "lr": 1e-2}
    for name in (
        "linear-probe",
        "clip-adapter",
        "tip-adapter",
        "tip-adapter-f",
        "coop",
        "lp-plus-plus",
        "proker",
    ):
        views = {"views": 0} if hasattr(find_method(name).Config(), "views") else {}  # none to be averaged
        slow, fast = (build_method(name, CLIP, files.classes, seed=1, **views) for _ in range(2))
        train(slow, files, Recipe.of(slow, **recipe))
        known = views_for(fast, files, Recipe.of(fast, **recipe))
        train(fast, files, Recipe.of(fast, **recipe), views=known)
        for key, tensor in slow.state_dict().items():
            torch.testing.assert_close(
                fast.state_dict()[key], tensor, atol=1e-4, rtol=1e-4, msg=f"{name} {key}"
            )


def test_keys_are_means_of_random_views_in_adapt(photos: Path) -> None:
    """`views` of a cache method has its documented effect; the oracle encodes every view by itself."""
    files = open_data(photos, "train")
    changes = {"epochs": 1, "batch": 4, "augment": False}
    settings = {"method": "tip-adapter", "backbone": CLIP, "calibrate": False, "balance": False}
    whole, mean = (
        adapt(files, recipe=changes, options={"views": views}, **settings).method for views in (0, 3)
    )
    feed = Feed(files, CLIP, Recipe.of(mean, **{**changes, "augment": True}))
    rows = list(range(len(files)))
    with torch.no_grad():
        parts = [
            torch.nn.functional.normalize(CLIP.encode_image(feed.views(rows, k).pixels)) for k in range(3)
        ]
    oracle = torch.nn.functional.normalize(sum(parts))
    torch.testing.assert_close(mean.keys, oracle, atol=1e-5, rtol=1e-4)
    assert (whole.keys - mean.keys).abs().max() > 1e-3


def test_features_are_refused_where_they_cannot_serve(photos: Path) -> None:
    files = open_data(photos, "train")
    probe = build_method("linear-probe", CLIP, files.classes)
    views = views_for(probe, files, Recipe.of(probe, augment=False))
    with pytest.raises(UsageError, match="augment = False"):
        train(probe, files, Recipe.of(probe, epochs=1), views=views)
    model = build_method("dear", CLIP, files.classes, roles=mixed_roles())
    assert views_for(model, files, Recipe.of(model, augment=False)) is None


def test_adapt_does_not_augment_what_only_reads_features(photos: Path, tmp_path: Path) -> None:
    assert (
        adapt(photos, backbone=CLIP, method="linear-probe", calibrate=False).spec.recipe["augment"] is False
    )
    asked = {"augment": True, "epochs": 1}
    assert (
        adapt(photos, backbone=CLIP, method="linear-probe", recipe=asked, calibrate=False).spec.recipe[
            "augment"
        ]
        is True
    )
    dear = adapt(photos, backbone=CLIP, roles=mixed_roles(), recipe={"epochs": 1}, calibrate=False)
    assert dear.spec.recipe["augment"] is True


def test_the_store_forgets_the_oldest_and_survives_damage(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path / "s.sqlite", limit=200_000)
    for number in range(60):
        store.put({bytes([number]) * 32: bytes(8000)})
    usage = store.usage()
    assert usage.size <= 200_000
    assert 0 < usage.entries < 60
    assert store.get([bytes([59]) * 32]) == {bytes([59]) * 32: bytes(8000)}
    assert store.get([bytes([0]) * 32]) == {}
    (tmp_path / "s.sqlite").write_bytes(b"not a database" * 1000)
    broken = FeatureStore(tmp_path / "s.sqlite")
    assert broken.get([b"x"]) == {}
    broken.put({b"x": b"y"})
    fresh = FeatureStore(tmp_path / "s.sqlite")
    fresh.put({b"x": b"y"})
    assert fresh.get([b"x"]) == {b"x": b"y"}


def test_a_damaged_row_is_computed_again(photos: Path) -> None:
    files = open_data(photos, "all")
    cache = FeatureCache()
    good = cache.image_features(CLIP, files)

    class Damaged(FeatureStore):
        def get(self, keys):
            return {key: value[:-3] for key, value in super().get(keys).items()}

    torch.testing.assert_close(FeatureCache(Damaged()).image_features(CLIP, files), good)


def test_nothing_is_kept_with_a_size_of_zero(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEAR_CACHE_MB", "0")
    FeatureCache().image_features(CLIP, open_data(photos, "all"))
    assert FeatureStore().usage().entries == 0
