"""The same images answer the same, whatever holds them: folder, table, Parquet, tar, frame, boxes, EXIF."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from tiny import Colors, tiny_clip

from dear.data.content import content_digest
from dear.data.open import open_data
from dear.data.unlabeled import open_unlabeled, unlabeled_part
from dear.runs.model import Model
from dear.runs.spec import Spec
from dear.tasks.adapt import adapt
from dear.train.setup.prepare import prepare

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")

CLIP = tiny_clip(dtype=torch.float32)
EACH, CLASSES = 5, 3
KINDS = (
    "csv",
    "jsonl",
    "paths.parquet",
    "bytes.parquet",
    "structs.parquet",
    "tar",
    "frame",
    "frame of images",
)
few = settings(
    max_examples=1, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    """File and class of each training image, in a folder of class folders."""
    folder, images = tmp_path_factory.mktemp("photos"), Colors(CLASSES, EACH)
    rows = []
    for place in range(len(images)):
        name = images.classes[int(images.labels[place])]
        path = folder / "train" / name / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        images.image(place).save(path)
        rows.append((path, name))
    return rows


@pytest.fixture(scope="module")
def expected(rows: list[tuple[Path, str]]) -> tuple[Model, NDArray[np.float32]]:
    return trained(rows[0][0].parents[2])


def trained(data: object) -> tuple[Model, NDArray[np.float32]]:
    """A model of the data, and its probabilities of other images."""
    model = adapt(data, method="proker", backbone=CLIP, shots=None)
    return model, model.probabilities(Colors(CLASSES, 2, seed=9)).numpy()


def held_in(kind: str, rows: list[tuple[Path, str]], folder: Path) -> object:
    """The images of the rows in another container."""
    split = {"split": ["train"] * len(rows)}
    labels = [label for _, label in rows]
    files = pandas.DataFrame({"path": [str(path) for path, _ in rows], "label": labels, **split})
    contents = [path.read_bytes() for path, _ in rows]
    target = folder / f"photos.{kind.rpartition('.')[2]}"
    match kind:
        case "csv":
            files.to_csv(target, index=False)
        case "jsonl":
            files.to_json(target, orient="records", lines=True)
        case "paths.parquet":
            files.to_parquet(target)
        case "bytes.parquet":
            pandas.DataFrame({"image": contents, "label": labels, **split}).to_parquet(target)
        case "structs.parquet":
            structs = [{"bytes": content, "path": None} for content in contents]
            frame = pandas.DataFrame({"image": structs, "label": labels, **split})
            frame.to_parquet(target, row_group_size=4)
        case "tar":
            names = [f"{place:03}" for place in range(len(rows))]
            with tarfile.open(target, "w") as tar:
                for name, content, label in zip(names, contents, labels, strict=True):
                    for member, data in ((f"{name}.png", content), (f"{name}.cls", label.encode())):
                        entry = tarfile.TarInfo(member)
                        entry.size = len(data)
                        tar.addfile(entry, io.BytesIO(data))
            return open_data(target, "all")  # by its name, a fifth would be held out
        case "frame":
            return files
        case "frame of images":
            return pandas.DataFrame({"image": contents, "label": labels, **split})
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_every_container_trains_the_same_model(
    tmp_path: Path, rows: list[tuple[Path, str]], expected: tuple[Model, NDArray[np.float32]], kind: str
) -> None:
    usual, probabilities = expected

    @few
    @given(st.permutations(rows))
    def check(order: list[tuple[Path, str]]) -> None:
        model, again = trained(held_in(kind, order, tmp_path))
        np.testing.assert_allclose(again, probabilities, atol=1e-4)
        assert sorted(model.calibration.nearness) == pytest.approx(
            sorted(usual.calibration.nearness), abs=1e-5
        )

    check()


def test_rotated_files_and_boxes_of_them_are_their_upright_images(
    tmp_path: Path, rows: list[tuple[Path, str]], expected: tuple[Model, NDArray[np.float32]]
) -> None:
    lines = []
    turns = {1: None, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90}
    for number, (path, label) in enumerate(rows):
        orientation, turn = list(turns.items())[number % 3]
        canvas = Image.new("RGB", (70, 50), "gray")
        canvas.paste(Image.open(path), (number, 2 * (number % 5)))
        exif = Image.Exif()
        exif[0x112] = orientation
        (canvas if turn is None else canvas.transpose(turn)).save(tmp_path / path.name, exif=exif)
        lines.append(f"{path.name},{label},train,{number},{2 * (number % 5)},24,24")
    table = tmp_path / "boxes.csv"
    table.write_text("path,label,split,x,y,width,height\n" + "\n".join(lines))
    model = adapt(table, method="proker", backbone=CLIP, shots=None, calibrate=False)
    usual = adapt(rows[0][0].parents[2], method="proker", backbone=CLIP, shots=None, calibrate=False)
    others = Colors(CLASSES, 2, seed=9)
    torch.testing.assert_close(model.probabilities(others), usual.probabilities(others), atol=1e-4, rtol=0)
    upright = usual.logits([path for path, _ in rows])["default"]
    for cached in (False, True):
        boxes = usual.logits(open_data(table, "train"), cached=cached)["default"]
        torch.testing.assert_close(boxes, upright, atol=1e-3, rtol=0)


def test_a_box_of_one_pixel_is_not_the_whole_image(tmp_path: Path) -> None:
    Colors(each=1).image(0).save(tmp_path / "a.png")
    (tmp_path / "fractions.csv").write_text("path,label,x,y,width,height\na.png,red,0,0,1,1\n")
    (tmp_path / "pixels.csv").write_text(
        "path,label,x,y,width,height\na.png,red,0,0,1,1\na.png,blue,2,2,9,9\n"
    )
    whole, pixel = (open_data(tmp_path / f"{name}.csv", "all") for name in ("fractions", "pixels"))
    place = pixel.labels.tolist().index(pixel.classes.index("red"))
    assert pixel.image(place).size == (1, 1)
    assert content_digest(pixel, place) != content_digest(whole, 0)


def test_rows_without_a_label_are_the_images_that_they_hold(
    tmp_path: Path, rows: list[tuple[Path, str]]
) -> None:
    labels = ["" if place % EACH == 0 else label for place, (_, label) in enumerate(rows)]
    contents = [path.read_bytes() for path, _ in rows]
    pandas.DataFrame({"image": contents, "label": labels}).to_parquet(tmp_path / "t.parquet")
    pool = unlabeled_part(tmp_path / "t.parquet")
    assert len(pool) == len(open_unlabeled(tmp_path / "t.parquet")) - (EACH - 1) * CLASSES == CLASSES
    assert np.array_equal(pool.image(1), Image.open(rows[EACH][0]))
    frame = pandas.DataFrame({"path": [str(path) for path, _ in rows], "label": labels})
    frame.assign(x=2, y=3, width=8, height=6).to_csv(tmp_path / "boxes.csv", index=False)
    assert unlabeled_part(tmp_path / "boxes.csv").image(1).size == (8, 6)
    assert unlabeled_part(tmp_path / "boxes.csv", margin=0.5).image(1).size == (14, 12)
    job = prepare(Spec(data=str(tmp_path / "t.parquet"), method="proker", unlabeled_weight=1.0), clip=CLIP)
    assert job.pool.images == CLASSES
