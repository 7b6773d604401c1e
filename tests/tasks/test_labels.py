"""Wrong labels: found by probabilities out of sample, ranked as well as by cleanlab, corrected on a page."""

import csv

import numpy as np
import pytest
import torch
from PIL import Image

import dear
import dear.runs.model
from dear.data.images import ListedImages
from dear.data.open import open_data, open_with_splits
from dear.data.shots import few_shot
from dear.errors import DataError
from dear.tasks.adapt import adapt
from dear.tasks.check import check_labels
from dear.tasks.labeling.answers import Answer, AnswerFile, read_labels
from dear.tasks.labeling.start import start_session
from dear.train.label_check import out_of_sample, rank_labels

COUNT = 30  # images per class of the folder


def clusters(seed: int = 0, classes: int = 6, per_class: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(per_class)
    centers = torch.randn(classes, 32, generator=generator)
    return centers[labels] + 1.6 * torch.randn(len(labels), 32, generator=generator), labels


def exchanged(labels: torch.Tensor, count: int = 9) -> torch.Tensor:
    wrong = labels.clone()
    places = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))[:count]
    wrong[places] = (wrong[places] + 1 + torch.arange(count) % 4) % 6
    return wrong


def test_no_image_is_judged_by_a_classifier_that_saw_it() -> None:
    features = torch.eye(40)  # every image tells itself apart and nothing else
    labels = torch.arange(2).repeat(20)
    probabilities = out_of_sample(features, labels, 2)
    assert abs(probabilities[np.arange(40), labels.numpy()].mean() - 0.5) < 0.05


def test_an_only_image_of_a_class_is_not_suspected() -> None:
    features, labels = clusters()
    labels = torch.cat([labels, torch.tensor([6])])
    features = torch.cat([features, features[:1]])
    places, _ = rank_labels(out_of_sample(features, labels, 7), labels)
    assert len(labels) - 1 not in places


def test_the_order_is_that_of_cleanlab_on_the_same_probabilities() -> None:
    rank = pytest.importorskip("cleanlab.rank")
    features, labels = clusters()
    given = exchanged(labels)
    probabilities = out_of_sample(features, given, 6)
    places, _ = rank_labels(probabilities, given)
    quality = rank.get_label_quality_scores(given.numpy(), probabilities)
    assert len(places) > 5
    assert np.all(np.diff(quality[places]) >= 0)
    assert places[0] == quality.argmin()


def test_exchanged_labels_are_found_with_the_right_suggestion() -> None:
    found = right = exchanges = suspected = 0
    for seed in range(4):
        features, labels = clusters(seed)
        given = exchanged(labels)
        places, best = rank_labels(out_of_sample(features, given, 6), given)
        wrong = set((given != labels).nonzero()[:, 0].tolist())
        exchanges += len(wrong)
        suspected += len(places)
        found += len(wrong & set(places))
        right += sum(int(best[place]) == int(labels[place]) for place in places if place in wrong)
    assert found > 0.6 * exchanges
    assert found > 0.6 * suspected
    assert right > 0.9 * found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Two classes of drawn images with one label exchanged."""
    root = tmp_path_factory.mktemp("photos")
    task = open_data("world:scenes", "train")
    for label, name in enumerate(("one", "two")):
        (root / name).mkdir()
        for number, index in enumerate((task.labels == label).nonzero()[:COUNT, 0].tolist()):
            task.image(index).save(root / name / f"{number}.png")
    (root / "one" / "0.png").rename(root / "two" / "wrong, one.png")
    return str(root)


def test_suspects_are_listed_and_checked_ones_are_not(folder, tmp_path) -> None:
    clip = dear.load("mini")
    images, splits = open_with_splits(folder)
    assert len(images) == 2 * COUNT
    assert set(splits) == {"train", "test"}
    check = check_labels(images, clip)
    assert [each.key for each in check.suspects[:1]] == ["two/wrong, one.png"]
    assert (check.suspects[0].label, check.suspects[0].suggestion) == ("two", "one")
    assert list(check.to_frame()["path"]) == [each.key for each in check.suspects]
    assert "two/wrong, one.png" in check._repr_html_()
    check.write(tmp_path / "suspects.csv")
    rows = list(csv.DictReader((tmp_path / "suspects.csv").open()))
    assert (rows[0]["path"], rows[0]["suggestion"]) == ("two/wrong, one.png", "one")
    file = AnswerFile(tmp_path / "labels.csv")
    file.add([Answer("two/wrong, one.png", "checked")])
    again = check_labels(images, clip, file.read().checked)
    assert again.suspects == check.suspects[1:]
    assert again.checked == 1


def test_labels_of_a_dataset_are_corrected_on_the_labeling_page(folder, tmp_path) -> None:
    session, _ = start_session(folder, tmp_path / "labels.csv", backbone=dear.load("mini"), data=folder)
    try:
        assert session.wait()
        item = session.state(mode="check")["item"]
        assert (item["path"], item["label"]) == ("two/wrong, one.png", "two")
        session.answer([item["place"]], "label", "one")
    finally:
        session.close()
    assert read_labels(tmp_path / "labels.csv")["two/wrong, one.png"] == "one"
    splits = open_with_splits(folder)[1]
    for split in ("train", "test"):  # the table keeps the splits
        corrected = open_data(tmp_path / "labels.csv", split, root=folder)
        assert len(corrected) == splits.count(split)
    with pytest.raises(DataError, match="nothing"):
        start_session(_other(tmp_path), tmp_path / "other.csv", backbone=dear.load("mini"), data=folder)


def _other(root) -> str:
    (root / "nothing").mkdir()
    Image.new("RGB", (32, 32)).save(root / "nothing" / "a.png")
    return str(root / "nothing")


def test_memory_images_work_too() -> None:
    items = tuple(Image.new("RGB", (64, 64), color) for color in ("red", "blue") for _ in range(4))
    images = ListedImages(items, torch.arange(2).repeat_interleave(4), ("red thing", "blue thing"))
    assert check_labels(images, dear.load("mini")).suspects == ()


def test_training_names_labels_that_look_wrong(caplog) -> None:
    images = open_data("world:vehicles", "train")
    some = few_shot(images.select_classes(images.classes[:4]), 12, 1)
    labels = some.labels.clone()
    labels[0] = (labels[0] + 1) % 4
    wrong = ListedImages(tuple(some.image(i) for i in range(len(some))), labels, some.classes)
    features = dear.runs.model.frozen_features(dear.load("mini"), wrong)
    expected = rank_labels(out_of_sample(features, labels, 4), labels)[0]
    assert expected
    trained = adapt(wrong, method="linear-probe", backbone=dear.load("mini"))
    assert trained.metrics["labels"]["look_wrong"] == len(expected)
    assert trained.metrics["labels"]["first"][0]["image"] == wrong.key(expected[0])
    assert wrong.key(expected[0]) in caplog.text
