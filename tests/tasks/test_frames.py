"""Every function that takes data takes a pandas frame, with the answer of the same table in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dear
from dear.errors import InputError

pandas = pytest.importorskip("pandas")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frames")
    generator = np.random.default_rng(0)
    rows = []
    for label, color in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        for number in range(12):
            pixels = np.clip(color + generator.integers(-25, 25, (32, 32, 3)), 0, 255).astype(np.uint8)
            path = folder / f"{label}{number}.png"
            Image.fromarray(pixels).save(path)
            rows.append((str(path), label, "test" if number >= 9 else "train"))
    pandas.DataFrame(rows, columns=["path", "label", "split"]).to_csv(folder / "table.csv", index=False)
    return folder / "table.csv"


@pytest.fixture(scope="module")
def run(table: Path) -> Path:
    folder = table.parent / "run"
    dear.adapt(table, folder, method="proker")
    return folder


def classes_and_probabilities(model: dear.Model, table: Path) -> Any:
    return [answer.classes for answer in model.answers(dear.open_data(table, "test").paths)]


def probabilities(classifier: dear.Classifier, table: Path) -> Any:
    return classifier.predict_proba(list(dear.open_data(table, "test").paths)).tolist()


CALLS: dict[str, Callable[[Any, Path, Path], Any]] = {
    "adapt": lambda data, run, table: classes_and_probabilities(dear.adapt(data, method="proker"), table),
    "held out": lambda data, run, table: [*dear.adapt(data, method="proker").metrics.values()][-1],
    "evaluate": lambda data, run, table: dear.evaluate(run, data).accuracy,
    "zeroshot": lambda data, run, table: dear.zeroshot(data).accuracy,
    "choose": lambda data, run, table: (
        dear.choose(data, methods="proker,zeroshot").to_frame().iloc[:, :3].to_dict()
    ),
    "embed": lambda data, run, table: dear.embed(data).features.tolist(),
    "audit": lambda data, run, table: str(dear.audit(data=data)),
    "fit": lambda data, run, table: probabilities(dear.Classifier(method="proker").fit(data), table),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_frame_is_its_table(name: str, run: Path, table: Path) -> None:
    frame = pandas.read_csv(table)
    assert CALLS[name](frame, run, table) == CALLS[name](table, run, table)


def test_unlabeled_images_come_in_a_frame(table: Path, tmp_path: Path) -> None:
    frame = pandas.read_csv(table)
    pool = frame[frame["split"] == "train"].groupby("label").tail(5)
    labeled = frame.drop(pool.index)
    pool[["path"]].to_csv(tmp_path / "pool.csv", index=False)
    of_frame, of_file = (
        dear.adapt(labeled, method="proker", unlabeled=unlabeled, unlabeled_weight=1.0)
        for unlabeled in (pool[["path"]], tmp_path / "pool.csv")
    )
    assert classes_and_probabilities(of_frame, table) == classes_and_probabilities(of_file, table)


def test_images_without_labels_come_in_a_frame(run: Path, table: Path) -> None:
    frame = pandas.read_csv(table)[["path"]]
    files = list(frame["path"])
    assert dear.predict(run, frame).labels == dear.predict(run, files).labels
    assert dear.drift(run, frame).far == dear.drift(run, files).far
    assert dear.label_next(frame, count=3).to_frame().equals(dear.label_next(files, count=3).to_frame())
    with pytest.raises(InputError, match="colour"):
        dear.predict(run, pandas.DataFrame({"colour": ["red"]}))
