"""Images and labels as people have them in Python: they work, or one sentence says why not."""

from __future__ import annotations

import pickle
from pathlib import Path

import food
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from tiny import Colors, mixed_roles, tiny_clip

from dear.classifier import Classifier
from dear.data.inputs import as_images, check_labels
from dear.errors import InputError
from dear.images.arrays import from_array

CLIP = tiny_clip(dtype=torch.float32)
COLORS = Colors(each=4)
NAMES = [COLORS.classes[label] for label in COLORS.labels.tolist()]


def classifier(**changes) -> Classifier:
    settings = {"backbone": CLIP, "roles": mixed_roles(), "epochs": 1, "batch": 4}
    return Classifier(**{**settings, **changes})


@pytest.fixture(scope="module")
def trained() -> Classifier:
    return classifier(epochs=4, lr=1e-2).fit([COLORS.image(i) for i in range(len(COLORS))], NAMES)


def test_every_kind_of_image_gives_the_same_answer(trained: Classifier, tmp_path: Path) -> None:
    bytes_hwc = [COLORS.data[i].permute(1, 2, 0).numpy() for i in range(len(COLORS))]
    COLORS.image(0).save(tmp_path / "a.png")
    expected = trained.predict_proba([COLORS.image(i) for i in range(len(COLORS))])
    for given in (
        bytes_hwc,
        np.stack(bytes_hwc),  # [n, H, W, 3]
        COLORS.data,  # tensor [n, 3, H, W] of bytes
        COLORS.data.float() / 255,
        [COLORS.data[i].numpy() for i in range(len(COLORS))],  # [3, H, W]
        pd.Series([COLORS.image(i) for i in range(len(COLORS))]),
    ):
        np.testing.assert_allclose(trained.predict_proba(given), expected, atol=1e-6)
    for one in (
        COLORS.image(0),
        bytes_hwc[0],
        COLORS.data[0],
        [str(tmp_path / "a.png")],
        [tmp_path / "a.png"],
    ):
        np.testing.assert_allclose(trained.predict_proba(one), expected[:1], atol=1e-6)
    table = pd.DataFrame({"path": [str(tmp_path / "a.png")] * 2, "label": ["red", "red"]})
    assert trained.predict(table["path"]).shape == (2,)
    assert trained.score(table["path"], table["label"]) in (0.0, 1.0)


@pytest.mark.parametrize(
    ("given", "item"),
    [
        ([None], "image 0"),
        ([3.5], r"image 0 .*float"),
        ([np.zeros((5, 7, 2))], r"image 0.*\[5, 7, 2\]"),
        ([np.full((5, 5, 3), -1.5)], r"image 0.*0 and 1"),
        ([np.full((5, 5, 3), 300)], r"image 0.*255"),
        ([torch.zeros(0, 3, 4)], r"image 0.*\[0, 3, 4\]"),
        ("a.jpg", r"\['a.jpg'\]"),
        (7, "int"),
        ([b"no image"], "image 0"),
        (pd.DataFrame({"colour": ["a"]}), "colour"),
    ],
)
def test_what_is_no_image_is_refused_with_its_place(given: object, item: str) -> None:
    with pytest.raises(InputError, match=item):
        as_images(given)


def test_gray_and_transparent_arrays() -> None:
    assert from_array(np.zeros((4, 6), dtype=np.uint8), "x").size == (6, 4)
    assert from_array(np.zeros((1, 4, 6), dtype=np.float32), "x").size == (6, 4)
    assert from_array(np.zeros((4, 6, 4), dtype=np.uint8), "x").mode == "RGBA"
    assert from_array(np.ones((4, 6), dtype=bool), "x").getpixel((0, 0)) == 255


@pytest.mark.parametrize(
    ("labels", "item"),
    [
        (["red", float("nan")] * 6, "label 1"),
        (["red", np.nan] * 6, "label 1"),
        (["red", pd.NA] * 6, "label 1"),
        (["red", pd.NaT] * 6, "label 1"),
        ([1, 2, 3, "four"] * 3, r"\(number, str\)"),
        ([True, 2] * 6, r"\(bool, number\)"),
        ([1.0, float("nan")] * 6, "label 1"),
        (pd.Series(["red", None] * 6), "label 1"),
        (["red", 3] * 6, r"\(number, str\)"),
        (pd.Series(["red", 3] * 6), r"\(number, str\)"),
        (["red"], r"\b12\b.*\b1\b"),
        ([["red", "blue"]] * 12, "'red'"),
    ],
)
def test_odd_labels(labels: object, item: str) -> None:
    images = [COLORS.image(i) for i in range(12)]
    with pytest.raises(InputError, match=item):
        classifier().fit(images, labels)


def test_texts_of_numpy_and_python_are_one_kind() -> None:
    labels = [np.str_("cat") if place % 2 else "cat" for place in range(6)]
    assert check_labels([*labels, "dog"], 7).tolist() == ["cat"] * 6 + ["dog"]


def test_integer_labels_ask_for_names() -> None:
    images, labels = [COLORS.image(i) for i in range(12)], COLORS.labels.tolist()
    with pytest.warns(UserWarning, match="'0'"):
        clf = classifier().fit(images, labels)
    assert clf.method_.classes == ("0", "1", "2")
    named = classifier().fit(images, labels, class_names={0: "red", 1: "green", 2: "blue"})
    assert named.method_.classes == ("red", "green", "blue")
    assert named.classes_.tolist() == [0, 1, 2]
    assert set(named.predict(images)) <= {0, 1, 2}
    listed = classifier().fit(images, labels, class_names=["red", "green", "blue"])
    assert listed.method_.classes == ("red", "green", "blue")
    with pytest.raises(InputError, match="label 2"):
        classifier().fit(images, labels, class_names={0: "red", 1: "green"})
    with pytest.raises(InputError, match=r"3 .*2 class names"):
        classifier().fit(images, labels, class_names=["red", "green"])


def test_a_pickle_holds_the_adapter_and_the_name_of_the_backbone(tmp_path: Path) -> None:
    folder = food.backbone(tmp_path / "tiny-clip")
    images = [COLORS.image(i) for i in range(12)]
    clf = Classifier(method="clip-adapter", backbone=folder, epochs=1).fit(images, NAMES)
    data = pickle.dumps(clf)
    weights = sum(path.stat().st_size for path in folder.iterdir())
    assert len(data) < 100_000 < weights
    again = pickle.loads(data)
    np.testing.assert_allclose(again.predict_proba(images), clf.predict_proba(images), atol=1e-6)
    assert again.get_params()["method"] == "clip-adapter"
    mini = Classifier(method="linear-probe", epochs=1).fit(images, NAMES)
    assert len(pickle.dumps(mini)) < 100_000
    assert not hasattr(pickle.loads(pickle.dumps(Classifier())), "method_")


def test_all_images_are_used_unless_shots_are_asked_for() -> None:
    images = [COLORS.image(i) for i in range(12)]
    assert Classifier().shots is None
    assert classifier().fit(images, NAMES).run_.spec.images == 12
    assert classifier(shots=2).fit(images, NAMES).run_.spec.images == 6


def test_an_image_that_is_no_list_of_files(trained: Classifier) -> None:
    assert trained.predict(Image.new("RGB", (30, 30))).shape == (1,)
