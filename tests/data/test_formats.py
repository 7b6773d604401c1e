"""Tables that point anywhere, Parquet with images inside, frames, COCO boxes, saved `datasets` folders."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dear.data.content import content_digest, source_of, stored_digest
from dear.data.open import default_split, open_data
from dear.data.stored import Box
from dear.data.unlabeled import open_unlabeled
from dear.errors import DataError, InputError, UsageError
from dear.images.open import open_image
from dear.runs.recipe import Recipe
from dear.train.crossval import Trials

pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")


def encoded(color: tuple[int, int, int], size: tuple[int, int] = (20, 16)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Eight images in a folder that holds no table: four red, four blue."""
    folder = tmp_path / "nas"
    folder.mkdir()
    for number in range(8):
        color = (200, number * 9, 0) if number < 4 else (0, number * 9, 200)
        (folder / f"{number}.png").write_bytes(encoded(color))
    return folder


def rows_of(photos: Path) -> list[tuple[str, str]]:
    return [(str(photos / f"{number}.png"), "red" if number < 4 else "blue") for number in range(8)]


@pytest.mark.parametrize("kind", ["absolute", "parents", "link", "root"])
def test_tables_point_anywhere(photos: Path, tmp_path: Path, kind: str) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "linked").symlink_to(photos)
    start = {"absolute": str(photos), "parents": "../nas", "link": "linked", "root": ""}[kind]
    lines = [f"{Path(start) / Path(path).name},{label}" for path, label in rows_of(photos)]
    (tables / "t.csv").write_text("path,label\n" + "\n".join(lines))
    images = open_data(tables / "t.csv", "all", root=photos if kind == "root" else None)
    assert images.classes == ("blue", "red")
    assert images.image(0).getpixel((0, 0)) == (200, 0, 0)
    split = [set(open_data(tables / "t.csv", part, root=photos if kind == "root" else None).paths)
             for part in ("train", "test")]  # fmt: skip
    assert split[0]
    assert split[1]
    assert not split[0] & split[1]


def test_the_same_images_in_every_format(photos: Path, tmp_path: Path) -> None:
    rows = rows_of(photos)
    frame = pandas.DataFrame(rows, columns=["path", "label"])
    contents = [Path(path).read_bytes() for path, _ in rows]
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    frame.to_parquet(tmp_path / "t.parquet")
    labels = [label for _, label in rows]
    pandas.DataFrame({"image": contents, "label": labels}).to_parquet(tmp_path / "bytes.parquet")
    structs = [{"bytes": content, "path": None} for content in contents]
    pandas.DataFrame({"image": structs, "label": labels}).to_parquet(
        tmp_path / "structs.parquet", row_group_size=3
    )
    sources = [
        tmp_path / name for name in ("t.csv", "t.jsonl", "t.parquet", "bytes.parquet", "structs.parquet")
    ]
    frames = [frame, pandas.DataFrame({"image": contents, "label": labels})]
    for source in [*sources, *frames]:
        images = open_data(source, "all")
        assert images.classes == ("blue", "red")
        assert images.labels.tolist() == [1] * 4 + [0] * 4
        assert [content_digest(images, row) for row in range(8)] == [
            content_digest(open_data(sources[0], "all"), row) for row in range(8)
        ]
        assert stored_digest(images, 3) is not None
        assert open_image(source_of(images, 5)).getpixel((0, 0)) == images.image(5).getpixel((0, 0))
        pixels = images.pixels([0, 7], 8)
        assert torch.equal(pixels[:, :, 0, 0], torch.tensor([[200, 0, 0], [0, 63, 200]], dtype=torch.uint8))
        part = images.subset([7, 0])
        assert part.labels.tolist() == [0, 1]
        assert part.key(0) == images.key(7)


def test_parquet_errors_name_row_and_column(tmp_path: Path) -> None:
    pandas.DataFrame({"image": [1.5, 2.5], "label": ["a", "b"]}).to_parquet(tmp_path / "numbers.parquet")
    with pytest.raises(DataError, match=r"numbers\.parquet, row 1, column image"):
        open_data(tmp_path / "numbers.parquet", "all")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"cut\.parquet"):
        open_data(tmp_path / "cut.parquet", "all")
    pandas.DataFrame({"file": ["a.png"], "label": ["a"]}).to_parquet(tmp_path / "odd.parquet")
    with pytest.raises(DataError, match="path"):
        open_data(tmp_path / "odd.parquet", "all")


def test_boxes_are_images(tmp_path: Path) -> None:
    pixels = np.zeros((40, 60, 3), dtype=np.uint8)
    pixels[:20, :30] = (255, 0, 0)
    pixels[20:, 30:] = (0, 0, 255)
    Image.fromarray(pixels).save(tmp_path / "scene.png")
    (tmp_path / "boxes.csv").write_text(
        "path,label,x,y,width,height\nscene.png,red,0,0,30,20\nscene.png,blue,0.5,0.5,0.5,0.5\n"
    )
    images = open_data(tmp_path / "boxes.csv", "all")
    assert [images.image(row).size for row in range(2)] == [(30, 20), (30, 20)]
    assert [images.image(row).getpixel((5, 5)) for row in range(2)] == [(255, 0, 0), (0, 0, 255)]
    assert images.key(0) != images.key(1)
    assert stored_digest(images, 0) != stored_digest(images, 1)
    coco = {
        "images": [{"id": 7, "file_name": "scene.png"}],
        "categories": [{"id": 1, "name": "red"}, {"id": 2, "name": "blue"}],
        "annotations": [
            {"image_id": 7, "category_id": 1, "bbox": [0, 0, 30, 20]},
            {"image_id": 7, "category_id": 2, "bbox": [30, 20, 30, 20]},
        ],
    }
    (tmp_path / "coco.json").write_text(json.dumps(coco))
    again = open_data(tmp_path / "coco.json", "all")
    assert again.classes == ("blue", "red")
    assert torch.equal(again.pixels([0, 1], 8), images.pixels([0, 1], 8))


@pytest.mark.parametrize(
    ("row", "column"), [("-1,0,5,5", "x"), ("0,0,0,5", "width"), ("0,0,much,5", "width"), ("0,nan,5,5", "y")]
)
def test_malformed_boxes_name_row_and_column(tmp_path: Path, row: str, column: str) -> None:
    (tmp_path / "a.png").write_bytes(encoded((1, 2, 3)))
    (tmp_path / "boxes.csv").write_text(f"path,label,x,y,width,height\na.png,a,0,0,4,4\na.png,b,{row}\n")
    with pytest.raises(DataError, match=rf"row 3: {column}"):
        open_data(tmp_path / "boxes.csv", "all")


def test_boxes_of_one_image_are_on_one_side(tmp_path: Path) -> None:
    lines = ["path,label,x,y,width,height"]
    for number in range(20):
        (tmp_path / f"{number}.png").write_bytes(encoded((12 * number, 2, 3)))
        lines += [f"{number}.png,{label},{place},0,2,2" for place, label in enumerate("abab")]
    (tmp_path / "boxes.csv").write_text("\n".join(lines))
    train, test = (open_data(tmp_path / "boxes.csv", split) for split in ("train", "test"))
    assert not set(train.files) & set(test.files)
    assert len(test) == 16


def test_boxes_of_one_image_are_held_out_together(tmp_path: Path) -> None:
    lines = ["path,label,x,y,width,height"]
    generator = np.random.default_rng(0)
    for number in range(12):  # each photo has four different boxes
        Image.fromarray(generator.integers(0, 256, (16, 64, 3), np.uint8)).save(tmp_path / f"{number}.png")
        lines += [f"{number}.png,{label},{16 * place},0,16,16" for place, label in enumerate("abab")]
    (tmp_path / "boxes.csv").write_text("\n".join(lines))
    images = open_data(tmp_path / "boxes.csv", "all")
    folds = Trials(images, Recipe()).folds(3)
    assert sum(map(len, folds)) == len(images)
    held = [{images.files[row] for row in fold.tolist()} for fold in folds]
    assert len(set.union(*held)) == sum(map(len, held)) == 12


@pytest.mark.parametrize("columns", ["path,label", "path,label,x,y,width,height"])
def test_a_table_too_small_to_hold_out_images(tmp_path: Path, columns: str) -> None:
    (tmp_path / "a.png").write_bytes(encoded((1, 2, 3)))
    box = ",0,0,2,2" if "x" in columns else ""
    (tmp_path / "one.csv").write_text(f"{columns}\na.png,a{box}\n")
    assert [len(open_data(tmp_path / "one.csv", split)) for split in ("train", "test")] == [1, 0]


@pytest.mark.parametrize(("key", "listed"), [("image_id", "images"), ("category_id", "categories")])
def test_a_coco_annotation_of_nothing_names_the_item(tmp_path: Path, key: str, listed: str) -> None:
    annotation = {"image_id": 7, "category_id": 1, "bbox": [0, 0, 3, 2], key: 99}
    coco = {
        "images": [{"id": 7, "file_name": "a.png"}],
        "categories": [{"id": 1, "name": "red"}],
        "annotations": [annotation],
    }
    (tmp_path / "coco.json").write_text(json.dumps(coco))
    with pytest.raises(DataError, match=f"annotation 1: {key} 99 .*{listed}"):
        open_data(tmp_path / "coco.json", "all")


def test_a_box_outside_its_image_names_the_row(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded((1, 2, 3)))
    (tmp_path / "boxes.csv").write_text("path,label,x,y,width,height\na.png,a,0,0,4,4\na.png,b,10,10,40,4\n")
    with pytest.raises(InputError, match=r"boxes\.csv, row 3"):
        open_data(tmp_path / "boxes.csv", "all").image(1)


def test_a_margin_stays_inside_the_image() -> None:
    assert Box(10, 10, 10, 10, margin=0.5).corners(100, 100) == (5, 5, 25, 25)
    assert Box(0, 0, 10, 10, margin=0.5).corners(12, 100) == (0, 0, 12, 15)


@pytest.mark.parametrize("split", [True, False])
def test_saved_datasets_folders(photos: Path, tmp_path: Path, split: bool) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["blue", "red"])}
    )
    records = [{"image": path, "label": label} for path, label in rows_of(photos)]
    table = datasets.Dataset.from_list(records, features=features)
    saved = datasets.DatasetDict({"train": table, "test": table.select([0, 7])}) if split else table
    saved.save_to_disk(str(tmp_path / "saved"))
    images = open_data(tmp_path / "saved", "all" if not split else "train")
    assert len(images) == 8
    assert images.classes == ("blue", "red")
    assert images.image(0).getpixel((0, 0)) == (200, 0, 0)
    assert len(open_data(tmp_path / "saved", "test")) == 2


def test_a_saved_dataset_with_one_split_holds_out_images_that_it_does_not_train_on(
    photos: Path, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    records = [{"image": path, "label": label} for path, label in rows_of(photos)]
    table = datasets.Dataset.from_list(records).cast_column("image", datasets.Image())
    for parts in ({"train": table}, {"training": table}):
        datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
        train, test = (open_data(tmp_path / "saved", split) for split in ("train", "test"))
        assert (len(train), len(test)) == (6, 2)
        assert not {train.key(i) for i in range(6)} & {test.key(i) for i in range(2)}
        assert len(open_data(tmp_path / "saved", "all")) == 8
        shutil.rmtree(tmp_path / "saved")
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "saved"))
    assert len(open_data(tmp_path / "saved", "test")) == 8
    with pytest.raises(DataError, match="train"):
        open_data(tmp_path / "saved", "train")


@pytest.mark.parametrize("listed", [True, False])
def test_splits_of_a_saved_dataset_have_all_classes_and_rows_of_different_names(
    photos: Path, tmp_path: Path, listed: bool
) -> None:
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["red", "blue"]) if listed else datasets.Value("string")
    features = datasets.Features({"image": datasets.Image(), "label": label})
    records = [{"image": path, "label": label} for path, label in rows_of(photos)]
    table = datasets.Dataset.from_list(records, features=features)
    parts = {"train": table, "test": table.select([0, 1]), "unlabeled": table.remove_columns("label")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    train, test = (open_data(tmp_path / "saved", split) for split in ("train", "test"))
    assert train.classes == test.classes == (("red", "blue") if listed else ("blue", "red"))
    assert [test.key(i) for i in range(2)] == ["row 8", "row 9"]
    assert test.image(1).getpixel((0, 0)) == train.image(1).getpixel((0, 0)) == (200, 9, 0)
    with pytest.raises(DataError, match="label"):
        open_data(tmp_path / "saved", "unlabeled")


def test_unlabeled_images_of_saved_datasets_and_tars(photos: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    paths = [path for path, _ in rows_of(photos)]
    table = datasets.Dataset.from_dict({"image": paths}).cast_column("image", datasets.Image())
    parts = datasets.DatasetDict({"train": table, "test": table.select([0])})
    parts.save_to_disk(str(tmp_path / "saved"))
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        for path in paths:
            tar.add(path, Path(path).name)
    for name in ("saved", "photos.tar"):
        images = open_unlabeled(tmp_path / name)
        assert images.labels.tolist() == [-1] * 8
        assert images.image(7).size == (20, 16)


@pytest.mark.parametrize("named", [True, False])
def test_rows_of_a_saved_dataset_without_a_label_are_left_out(
    photos: Path, tmp_path: Path, named: bool
) -> None:
    datasets = pytest.importorskip("datasets")
    label = datasets.ClassLabel(names=["blue", "red"]) if named else datasets.Value("string")
    records = [{"image": path, "label": label} for path, label in rows_of(photos)]
    records[2]["label"] = None
    records[5]["label"] = -1 if named else ""
    features = datasets.Features({"image": datasets.Image(), "label": label})
    datasets.Dataset.from_list(records, features=features).save_to_disk(str(tmp_path / "saved"))
    images = open_data(tmp_path / "saved", "all")
    assert images.classes == ("blue", "red")
    assert images.labels.tolist() == [1, 1, 1, 0, 0, 0]
    assert [images.key(index) for index in range(len(images))] == [f"row {row}" for row in (0, 1, 3, 4, 6, 7)]
    for record in records:
        record["label"] = None
    datasets.Dataset.from_list(records, features=features).save_to_disk(str(tmp_path / "unlabeled"))
    with pytest.raises(DataError, match="unlabeled"):
        open_data(tmp_path / "unlabeled", "all")


def test_tars_are_read_whatever_the_case_of_their_ending(tmp_path: Path) -> None:
    for name in ("a.tar", "B.TAR"):
        with tarfile.open(tmp_path / name, "w") as tar:
            for key, label in (("1", b"cat"), ("2", b"dog")):
                for ending, content in (("png", encoded((len(name), 9, 9))), ("cls", label)):
                    info = tarfile.TarInfo(f"{name[0]}{key}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    assert len(open_data(tmp_path, "all")) == 4


def test_margin_of_boxes(photos: Path, tmp_path: Path) -> None:
    rows = "\n".join(f"{path},{label},5,4,10,8" for path, label in rows_of(photos))
    (tmp_path / "boxes.csv").write_text("path,label,x,y,width,height\n" + rows)
    assert open_data(tmp_path / "boxes.csv", "all").image(0).size == (10, 8)
    assert open_data(tmp_path / "boxes.csv", "all", margin=0.5).image(0).size == (20, 16)
    with pytest.raises(UsageError, match="11"):
        open_data(tmp_path / "boxes.csv", "all", margin=11)
    (tmp_path / "t.csv").write_text("path,label\n" + "\n".join(",".join(row) for row in rows_of(photos)))
    for data in (tmp_path / "t.csv", pandas.read_csv(tmp_path / "t.csv"), "world:textures"):
        with pytest.raises(UsageError, match="boxes"):
            open_data(data, "all", margin=0.1)
    (tmp_path / "one.csv").write_text(f"path,label,x,y,width,height\n{photos / '0.png'},red,5,4,10,8\n")
    assert len(open_data(tmp_path / "one.csv", "test", margin=0.1)) == 0


def test_a_named_split_folder_is_used_where_no_labels_are(photos: Path, tmp_path: Path) -> None:
    for split, numbers in (("train", (0, 1)), ("val", (2, 3))):
        for number in numbers:
            target = tmp_path / "food" / split / "pie" / f"{number}.png"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((photos / f"{number}.png").read_bytes())
    assert default_split(str(tmp_path / "food" / "val"), "train") == "all"
    assert default_split(str(tmp_path / "food"), "train") == "train"
    assert len(open_data(tmp_path / "food" / "val", "all")) == 2


def test_a_box_of_one_pixel_is_no_fraction_where_others_are_pixels(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded((1, 2, 3)))
    head, sizes = "path,label,x,y,width,height\na.png,dot,0,0,1,1\n", []
    for other in ("0,0,9,9", "0,0,0.5,0.5"):
        (tmp_path / "boxes.csv").write_text(f"{head}a.png,patch,{other}\n")
        images = open_data(tmp_path / "boxes.csv", "all")
        sizes.append(sorted(images.image(place).size for place in range(2)))
    assert sizes == [[(1, 1), (9, 9)], [(10, 8), (20, 16)]]


def test_a_frame_may_lack_labels_whatever_its_column_types(photos: Path) -> None:
    paths = [path for path, _ in rows_of(photos)]
    for labels, classes in (
        (pandas.Series([0.0, 1.0, None, 1.0] * 2), ("0", "1")),
        (pandas.Series(["red", "blue", None, "blue"] * 2, dtype="string"), ("blue", "red")),
    ):
        images = open_data(pandas.DataFrame({"path": paths, "label": labels}), "all")
        assert images.classes == classes
        assert len(images) == 6
    with pytest.raises(DataError, match=r"0\.5"):
        open_data(pandas.DataFrame({"path": paths, "label": [0.5, 1] * 4}), "all")


def test_frames_of_arrays_and_pillow_images() -> None:
    array = np.full((8, 6, 3), 7, dtype=np.uint8)
    frame = pandas.DataFrame({"image": [array, Image.fromarray(array)], "label": ["a", "b"]})
    images = open_data(frame, "all")
    assert [np.asarray(images.image(place)).tolist() for place in range(2)] == [array.tolist()] * 2
    assert stored_digest(images, 0) == stored_digest(images, 1)
