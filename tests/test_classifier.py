"""`dear.Classifier`: scikit-learn's manners, saving, and odd training sets."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from tiny import Colors, mixed_roles, tiny_clip

import dear
from dear.classifier import Classifier
from dear.errors import DataError, DearError, InputError, RunError, UsageError
from dear.methods import build_method

CLIP = tiny_clip(dtype=torch.float32)


def classifier(**changes) -> Classifier:
    settings = {"backbone": CLIP, "roles": mixed_roles(), "epochs": 6, "batch": 4, "lr": 2e-2}
    settings["calibrate"] = False  # tests/tasks/test_answers.py
    return Classifier(**{**settings, **changes})


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """photos/{train,test}/{red,green,blue}/n.png."""
    root = tmp_path_factory.mktemp("photos")
    for split, seed in (("train", 0), ("test", 1)):
        images = Colors(each=5, seed=seed)
        for i, label in enumerate(images.labels.tolist()):
            path = root / split / images.classes[label] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            images.image(i).save(path)
    return root


def listed(photos: Path, split: str = "train") -> tuple[list[str], list[str]]:
    files = sorted((photos / split).rglob("*.png"))
    return [str(f) for f in files], [f.parent.name for f in files]


def test_fit_predict_score_save_load(photos: Path, tmp_path: Path) -> None:
    clf = classifier(epochs=12).fit(photos / "train")
    files, truth = listed(photos, "test")
    proba = clf.predict_proba(files)
    assert proba.shape == (15, 3)
    np.testing.assert_allclose(proba.sum(1), 1, rtol=1e-5)
    assert (clf.predict(files) == clf.classes_[proba.argmax(1)]).all()
    assert clf.score(files, truth) == pytest.approx(clf.score(photos / "test"))
    assert clf.score(files, truth) > 0.7
    clf.save(tmp_path / "run")
    again = Classifier.load(tmp_path / "run", backbone=CLIP)
    np.testing.assert_array_equal(again.predict_proba(files), proba)
    assert again.get_params()["epochs"] == 12
    again.save(tmp_path / "copy")
    saved = [(tmp_path / name / "adapter.safetensors").read_bytes() for name in ("run", "copy")]
    assert saved[0] == saved[1]


def test_refused_images_count_as_wrong_in_every_score(photos: Path) -> None:
    clf = classifier(method="linear-probe", calibrate=True, reject=0.5).fit(photos / "train")
    files, truth = listed(photos, "test")
    answers = clf.predict(files)
    assert "none of these" in answers
    assert clf.score(photos / "test") == clf.score(files, truth) == np.mean(answers == np.array(truth))
    weights = np.arange(len(files))
    weighted = clf.score(files, truth, sample_weight=weights)
    assert weighted == pytest.approx(np.average(answers == np.array(truth), weights=weights))


@pytest.mark.parametrize("names", [["hue"] * 2 + ["blue"], {"blue": "hue", "green": "hue", "red": "red"}])
def test_two_labels_with_one_name_are_refused(photos: Path, names) -> None:
    files, truth = listed(photos)
    with pytest.raises(InputError, match=r"'blue' .*'green' .*'hue'"):
        classifier().fit(files, truth, class_names=names)


def test_load_restores_every_parameter(photos: Path, tmp_path: Path) -> None:
    settings = {
        "method": "tip-adapter", "backbone": CLIP, "shots": 3, "seed": 5, "template": "a {} thing.",
        "mode": "default", "recipe": ["weight_decay=0.02", "scale=[0.4, 0.9]", "flip=0.25"],
        "epochs": 2, "batch": 5, "lr": 0.01, "options": {"alpha": 2.0},
        "device": "cpu", "without": "hue: red, green", "examples": str(photos / "test"), "way": "leace",
        "calibrate": True, "reject": 0.2, "class_weight": None, "unreadable": "skip",
    }  # fmt: skip
    clf = Classifier(**settings).fit(photos / "train")
    clf.save(tmp_path / "run")
    loaded = Classifier.load(tmp_path / "run", backbone=CLIP, device="cpu")
    found = loaded.get_params()
    assert set(settings) | {"roles", "focus", "texts", "tree"} == set(found)
    assert found.pop("options")["alpha"] == settings.pop("options")["alpha"]
    assert {name: found[name] for name in settings} == settings
    again = clone(loaded).fit(photos / "train")
    assert again.run_.spec.differences(clf.run_.spec) == []
    files, _ = listed(photos, "test")
    np.testing.assert_allclose(again.predict_proba(files), clf.predict_proba(files), atol=1e-6)


def test_predict_takes_what_fit_and_score_take_and_goes_on_after_a_bad_file(
    photos: Path, tmp_path: Path
) -> None:
    clf = classifier(epochs=1).fit(photos)
    files, _ = listed(photos, "test")
    expected = clf.predict(files)
    assert (clf.predict(photos) == expected).all()
    assert (clf.predict_proba(str(photos)) == clf.predict_proba(files)).all()
    red = photos / "test" / "red"  # a folder of images without classes
    assert (clf.predict(red) == clf.predict(sorted(red.iterdir()))).all()
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    with pytest.warns(UserWarning, match=r"bad\.png"):
        found = clf.predict([files[0], bad, files[1]])
    assert found.tolist() == [expected[0], None, expected[1]]
    with pytest.warns(UserWarning, match=r"bad\.png"):
        rows = clf.predict_proba([files[0], bad])
    assert np.isnan(rows[1]).all()
    assert not np.isnan(rows[0]).any()
    with pytest.raises(InputError, match=r"bad\.png"):
        clf.predict([bad])


def test_probabilities_have_clips_temperature(photos: Path) -> None:
    """They are the softmax of temperature times cosine: recomputed from features of the frozen model."""
    clf = classifier(method="zeroshot", roles=None, calibrate=False).fit(photos / "train")
    files, _ = listed(photos, "test")
    pixels = torch.stack([CLIP.preprocess(Image.open(f)) for f in files])
    images = torch.nn.functional.normalize(CLIP.encode_image(pixels), dim=-1)
    texts = CLIP.encode_text([f"a photo of a {name}." for name in clf.classes_])
    expected = (CLIP.logit_scale * images @ torch.nn.functional.normalize(texts, dim=-1).T).softmax(-1)
    np.testing.assert_allclose(clf.predict_proba(files), expected.numpy(), atol=1e-5)


def test_labels_of_any_kind_come_back(photos: Path) -> None:
    files, truth = listed(photos)
    numbers = [{"red": 7, "green": 3, "blue": 5}[t] for t in truth]
    clf = classifier(epochs=1).fit(files, numbers)
    assert clf.classes_.tolist() == [3, 5, 7]
    assert set(clf.predict(files)) <= {3, 5, 7}
    assert clf.predict([Image.open(files[0])]).shape == (1,)


def test_clone_and_grid_search(photos: Path) -> None:
    files, truth = listed(photos)
    clf = classifier(epochs=1, shots=2)
    copy = clone(clf)
    assert copy.get_params()["lr"] == 2e-2
    assert not hasattr(copy, "method_")
    search = GridSearchCV(clf, {"lr": [1e-3, 2e-2], "options": [{"beta": 0.9}, {"beta": 0.5}]}, cv=2)
    search.fit(files, truth)
    assert search.best_params_["lr"] in (1e-3, 2e-2)
    assert search.best_estimator_.predict(files[:2]).shape == (2,)
    assert cross_val_score(classifier(epochs=1), files, truth, cv=2).shape == (2,)


def test_same_seed_same_answers(photos: Path) -> None:
    files, truth = listed(photos)
    first, second = (classifier(epochs=2, shots=3).fit(files, truth).predict_proba(files) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_not_fitted_and_wrong_use(photos: Path) -> None:
    files, truth = listed(photos)
    with pytest.raises(NotFittedError):
        classifier().predict(files)
    with pytest.raises(InputError, match=r"\by\b"):
        classifier().fit(files)
    with pytest.raises(InputError, match=r"\b15\b.*\b2\b"):
        classifier().fit(files, truth[:2])
    with pytest.raises(UsageError, match="'deer'"):
        classifier(method="deer").fit(files, truth)
    with pytest.raises(DearError, match="nowhere"):
        classifier().fit("nowhere")
    with pytest.raises(UsageError, match="'fast'"):
        classifier(epochs=1, mode="fast").fit(files, truth)


def test_one_class(photos: Path) -> None:
    files, truth = listed(photos)
    reds = [f for f, t in zip(files, truth, strict=True) if t == "red"]
    with pytest.raises(DataError, match="'red'"):
        classifier().fit(reds, ["red"] * len(reds))


def test_two_images(photos: Path) -> None:
    files, truth = listed(photos)
    clf = classifier(epochs=2).fit([files[0], files[-1]], [truth[0], truth[-1]])
    assert clf.predict_proba(files[:1]).shape == (1, 2)
    assert clf.predict(files[0]).tolist() == clf.predict(files[:1]).tolist()


def test_an_empty_class_is_named(tmp_path: Path) -> None:
    images = Colors()
    images.classes = ("red", "green", "blue", "pink")
    with pytest.raises(DataError, match="'pink'"):
        classifier().fit(images)


def test_classes_that_differ_only_in_case_are_named(photos: Path) -> None:
    files, _ = listed(photos)
    with pytest.raises(DataError, match=r"'Cat'.*'cat'"):
        classifier().fit(files[:2], ["Cat", "cat"])


def test_a_thousand_classes() -> None:
    names = [f"thing number {i}" for i in range(1000)]
    model = build_method("dear", CLIP, names, roles=mixed_roles())
    pixels, labels = torch.randn(4, 3, 24, 24), torch.tensor([0, 999, 500, 3])
    model.loss(pixels, labels).total.backward()
    assert model.logits(pixels).shape == (4, 1000)
    assert torch.isfinite(model.text_tokens.grad).all()


def test_loading_says_what_is_wrong(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DearError, match=r"config\.json"):
        Classifier.load(tmp_path)
    classifier(epochs=1).fit(photos / "train").save(tmp_path / "run")
    with pytest.raises(RunError, match="'tiny'"):
        Classifier.load(tmp_path / "run")


@pytest.mark.parametrize(
    ("value", "remedy"),
    [("mini", "backbone='mini'"), ("linear-probe", "method='linear-probe'"), (Path("b"), "backbone=")],
)
def test_a_positional_argument_names_its_keyword(value: object, remedy: str) -> None:
    with pytest.raises(TypeError, match=re.escape(remedy)):
        dear.Classifier(value)  # type: ignore[misc]
    assert "method" in dear.Classifier().get_params()  # scikit-learn reads the signature of __init__


def test_functions_take_a_fitted_classifier_or_name_what_they_take(photos: Path) -> None:
    clf = classifier(method="linear-probe", calibrate=True).fit(photos / "train")
    files, _ = listed(photos, "test")
    assert dear.predict(clf, files).labels == clf.predict(files).tolist()
    assert clf.run_.predict(files[0]).labels == clf.predict(files[:1]).tolist()
    assert (clf.predict(files, reject=True) == clf.predict(files, reject=0.05)).all()
    with pytest.raises(UsageError, match="Classifier"):
        dear.predict(dear.Classifier(), files)
    with pytest.raises(AttributeError, match="probabilities"):
        clf.run_.predict_proba(files)


def test_image_sets_can_be_indexed_and_sliced(photos: Path) -> None:
    images = dear.open_data(photos / "train")
    assert images[-1][1] == int(images.labels[-1])
    assert images[1:3].paths == images.paths[1:3]
    with pytest.raises(IndexError, match=str(len(images))):
        images[len(images)]
