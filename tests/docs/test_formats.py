"""docs/formats.md: every example runs, in a folder that holds the same photos in every format."""

from __future__ import annotations

import json
import re
import shlex
import tarfile
from pathlib import Path

import pytest
from PIL import Image
from typed import dear

pandas = pytest.importorskip("pandas")
datasets = pytest.importorskip("datasets")
PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def make_files(folder: Path) -> None:
    rows = []
    for label, color in (("red", (200, 20, 20)), ("blue", (20, 20, 200))):
        for number in range(10):
            path = folder / "photos" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (24, 18), (color[0], 9 * number, color[2])).save(path)
            rows.append({"path": f"photos/{label}/{number}.png", "label": label})
    frame = pandas.DataFrame(rows)
    frame.to_csv(folder / "photos.csv", index=False)
    several = [f"{row['label']};{'dark' if place % 10 < 5 else 'bright'}" for place, row in enumerate(rows)]
    frame.drop(columns="label").assign(labels=several).to_csv(folder / "several.csv", index=False)
    (folder / "green").mkdir()
    for number in range(3):
        Image.new("RGB", (24, 18), (20, 180 + 9 * number, 20)).save(folder / "green" / f"{number}.png")
    (folder / "tree.json").write_text(json.dumps({"warm": ["red"], "cold": ["blue"]}))
    texts = {"red": ["Something in the color of blood.", "scarlet"], "blue": ["Something like the sea."]}
    (folder / "texts.json").write_text(json.dumps(texts))
    (folder / "elsewhere").mkdir()
    frame.to_csv(folder / "elsewhere" / "photos.csv", index=False)
    contents = [{"bytes": (folder / row["path"]).read_bytes(), "path": row["path"]} for row in rows]
    pandas.DataFrame({"image": contents, "label": frame["label"]}).to_parquet(folder / "photos.parquet")
    with tarfile.open(folder / "photos.tar", "w") as tar:
        for number, row in enumerate(rows):
            (folder / "label.cls").write_text(row["label"])
            tar.add(folder / row["path"], f"{number}.png")
            tar.add(folder / "label.cls", f"{number}.cls")
    frame.assign(x=0, y=0, width=12, height=9).to_csv(folder / "boxes.csv", index=False)
    coco = {
        "images": [{"id": number, "file_name": row["path"]} for number, row in enumerate(rows)],
        "categories": [{"id": 0, "name": "red"}, {"id": 1, "name": "blue"}],
        "annotations": [
            {"image_id": number, "category_id": int(row["label"] == "blue"), "bbox": [2, 2, 9, 9]}
            for number, row in enumerate(rows)
        ],
    }
    (folder / "coco.json").write_text(json.dumps(coco))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    table = datasets.Dataset.from_list(
        [{"image": str(folder / row["path"]), "label": row["label"]} for row in rows], features=features
    )
    datasets.DatasetDict({"train": table}).save_to_disk(str(folder / "saved"))


def test_examples_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_files(tmp_path)
    for kind, text in BLOCKS:
        if kind == "python":
            exec(compile(text, str(PAGE), "exec"), {})
            continue
        for line in text.strip().splitlines():
            status, output = dear(*shlex.split(line)[1:])
            assert status == 0, f"{line}\n{output}"
