"""What to label next, answers on disk, and exchange with Label Studio."""

from __future__ import annotations

import csv
import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny import Colors, tiny_clip
from typer.testing import CliRunner

from dear.cli import build_app
from dear.data.open import open_data
from dear.data.unlabeled import unlabeled_part
from dear.errors import DataError, InputError
from dear.tasks.labeling.answers import Answer, AnswerFile, read_labels
from dear.tasks.labeling.exchange import add_labels, import_labels, write_tasks
from dear.tasks.labeling.learn import describe_forecast
from dear.tasks.labeling.next import label_next, write_choices
from dear.unlabeled import Forecast

CLIP = tiny_clip(dtype=torch.float32)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pool")
    images = Colors(each=8, seed=2)
    for place in range(len(images)):
        images.image(place).save(root / f"{place}.png")
        images.image(place).save(root / f"copy {place}.png")
    return root


def test_without_labels_every_prefix_spreads_over_clusters(pool: Path, tmp_path: Path) -> None:
    chosen = label_next(pool, count=12, backbone=CLIP, classes=["red", "green", "blue"])
    numbers = [choice.path.removeprefix("copy ") for choice in chosen.choices]
    assert len(numbers) == len(set(numbers)) == 12  # never an image and its copy
    colors = Colors(each=8, seed=2).labels.tolist()
    assert {colors[int(Path(name).stem)] for name in numbers[:3]} == {0, 1, 2}
    assert all(0 < choice.confidence <= 1 for choice in chosen.choices)
    assert (
        label_next(pool, count=5, backbone=CLIP, classes=["red", "green", "blue"]).choices
        == chosen.choices[:5]
    )
    write_choices(chosen, pool / "next.csv")
    rows = list(csv.DictReader((pool / "next.csv").open(encoding="utf-8")))
    assert [row["path"] for row in rows] == [choice.path for choice in chosen.choices]
    assert len(unlabeled_part(pool / "next.csv")) == 12  # nothing is filled in yet
    (pool / "next.csv").unlink()


def test_with_labels(pool: Path, tmp_path: Path) -> None:
    labels = {
        f"{place}.png": ("red", "green", "blue")[Colors(each=8, seed=2).labels[place]] for place in (0, 8, 16)
    }
    table = tmp_path / "labels.csv"
    AnswerFile(table).add([Answer(path, "label", name) for path, name in labels.items()])
    chosen = label_next(pool, count=10, backbone=CLIP, data=table, data_root=pool)
    assert len(chosen.choices) == 10
    assert not {choice.path.removeprefix("copy ") for choice in chosen.choices} & set(labels)
    assert set(chosen.classes) == {"red", "green", "blue"}
    with pytest.raises(InputError, match="green"):
        label_next(pool, count=10, backbone=CLIP, data=table, data_root=pool, classes=["red", "blue"])
    with pytest.raises(InputError, match="0"):
        label_next(pool, count=0, backbone=CLIP)
    for wrong in ({"out": tmp_path / "next.txt"}, {"tasks": tmp_path / "next.txt"}):
        with pytest.raises(InputError, match=r"next\.txt"):
            label_next(pool, backbone="no such backbone", **wrong)


def test_unreadable_images_are_listed(tmp_path: Path) -> None:
    Colors(each=1, seed=0).image(0).save(tmp_path / "good.png")
    (tmp_path / "bad.png").write_bytes(b"x")
    chosen = label_next(tmp_path, count=5, backbone=CLIP)
    assert [choice.path for choice in chosen.choices] == ["good.png"]
    assert "bad.png" in chosen.unreadable[0]
    (tmp_path / "good.png").unlink()
    with pytest.raises(DataError, match=r"bad\.png"):
        label_next(tmp_path, count=5, backbone=CLIP)


def answer(path: Path, name: str) -> None:
    file = AnswerFile(path)
    for number in range(20):
        file.add([Answer(f"{name}{number}.jpg", "label", name)])


def test_two_processes_never_overwrite_each_other(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=answer, args=(path, name)) for name in ("cat", "dog")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(read_labels(path)) == len(AnswerFile(path).read().labels) == 40


def test_answers_survive_a_kill_and_edits_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "labels.csv"
    file = AnswerFile(path)
    file.add([Answer("a.jpg", "label", "кошка"), Answer("b.jpg", "none"), Answer("c.jpg", "skip")])
    file.add([Answer("a.jpg", "checked"), Answer("", "class", "犬")])
    with open(file.journal, "a", encoding="utf-8") as journal:
        journal.write("d.jpg,lab")  # killed while writing
    again = AnswerFile(path).read()
    assert again.labels == {"a.jpg": "кошка"}
    assert (again.none, again.skipped, again.checked) == ({"b.jpg"}, {"c.jpg"}, {"a.jpg"})
    assert again.classes == ("кошка", "犬")
    file.add([Answer("c.jpg", "label", "犬"), Answer("c.jpg", "undo")])
    assert "c.jpg" in file.read().skipped
    path.write_text(path.read_text(encoding="utf-8") + "e.jpg,犬\n", encoding="utf-8")
    assert AnswerFile(path).read().labels == {"a.jpg": "кошка", "e.jpg": "犬"}
    with pytest.raises(InputError, match="maybe"):
        file.add([Answer("a.jpg", "maybe")])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"labels\.txt"):
        AnswerFile(tmp_path / "labels.txt")
    file.journal.write_text("x,y\n")
    with pytest.raises(DataError, match="x,y"):
        AnswerFile(path)


def test_a_label_that_a_kill_kept_out_of_the_table_returns_to_it(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path / "labels.csv")
    file.add([Answer("a.jpg", "label", "cat")])
    with open(file.journal, "a", encoding="utf-8") as journal:
        journal.write("b.jpg,label,dog\n")
    AnswerFile(file.path)
    assert read_labels(file.path) == {"a.jpg": "cat", "b.jpg": "dog"}


def test_label_studio_there_and_back(pool: Path, tmp_path: Path) -> None:
    chosen = label_next(pool, count=3, backbone=CLIP, classes=["red", "green", "blue"])
    write_tasks(chosen, tmp_path / "tasks.json")
    tasks = json.loads((tmp_path / "tasks.json").read_text())
    for task in tasks:  # what a person answers in Label Studio
        task["annotations"] = [{"was_cancelled": False, "result": task.pop("predictions")[0]["result"]}]
    tasks[2]["annotations"][0]["was_cancelled"] = True
    (tmp_path / "export.json").write_text(json.dumps(tasks))
    expected = {choice.path: choice.guess for choice in chosen.choices[:2]}
    assert import_labels(tmp_path / "export.json") == expected
    short = [
        {"image": f"http://host/data/upload/1/{choice.path}", "choice": "red"} for choice in chosen.choices
    ]
    (tmp_path / "min.json").write_text(json.dumps(short))
    assert import_labels(tmp_path / "min.json", pool) == {choice.path: "red" for choice in chosen.choices}
    (tmp_path / "min.csv").write_text(
        f"annotation_id,choice,image\n1,red,/data/local-files/?d=x/{short[0]['image']}\n"
    )
    assert list(import_labels(tmp_path / "min.csv", pool)) == [chosen.choices[0].path]
    for number, record in enumerate(short):  # an uploaded file
        record["image"] = f"/data/upload/1/0b1c2d3e-{chosen.choices[number].path}"
    (tmp_path / "uploaded.json").write_text(json.dumps(short))
    assert import_labels(tmp_path / "uploaded.json", pool) == {
        choice.path: "red" for choice in chosen.choices
    }
    path = chosen.choices[0].path
    (tmp_path / "twice.json").write_text(
        json.dumps([{"image": f"x/{path}", "choice": "red"}, {"image": f"y/{path}", "choice": "blue"}])
    )
    with pytest.raises(DataError, match=r"'red'.*'blue'"):
        import_labels(tmp_path / "twice.json", pool)
    (tmp_path / "no-header.csv").write_text("a.png,cat\nb.png,dog\n")
    with pytest.raises(DataError, match=r"no-header\.csv.*path"):
        import_labels(tmp_path / "no-header.csv")
    (tmp_path / "named.json").write_text(  # a project that names its control otherwise
        json.dumps([{"id": 1, "image": "a.png", "animal": "cat", "annotator": 1, "lead_time": 2.5}])
    )
    assert import_labels(tmp_path / "named.json") == {"a.png": "cat"}
    (tmp_path / "two.json").write_text(json.dumps([{"image": "a.png", "animal": "cat", "color": "red"}]))
    with pytest.raises(DataError, match="animal, color"):
        import_labels(tmp_path / "two.json")
    (tmp_path / "several.json").write_text(
        json.dumps([{"image": "a.png", "choice": {"choices": ["cat", "dog"]}}])
    )
    with pytest.raises(DataError, match="choice"):
        import_labels(tmp_path / "several.json")
    (tmp_path / "other.json").write_text(json.dumps([{"image": "nowhere.png", "choice": "red"}]))
    (tmp_path / "none.json").write_text("[]")
    with pytest.raises(DataError, match=r"nowhere\.png"):
        import_labels(tmp_path / "other.json", pool)
    with pytest.raises(DataError, match=r"none\.json"):
        import_labels(tmp_path / "none.json")


def test_imported_class_folders_keep_their_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("red", "blue"):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8), name).save(tmp_path / "photos" / split / name / f"{split}.png")
    table = tmp_path / "labels.csv"
    assert add_labels(tmp_path / "photos", table).added == 4
    assert open_data(table, "train", root=tmp_path / "photos").paths == (
        "train/blue/train.png",
        "train/red/train.png",
    )
    assert len(open_data(table, "test", root=tmp_path / "photos")) == 2


def test_commands(pool: Path, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(build_app(), list(words))
        assert result.exit_code == 0, f"{result.output} {result.exception!r}"
        return result.stdout

    out = tmp_path / "next.csv"
    words = (
        "--classes",
        "red,green,blue",
        "--count",
        "4",
        "--out",
        str(out),
        "--tasks",
        str(tmp_path / "t.json"),
    )
    report = json.loads(run("label", "next", str(pool), *words, "--json"))
    assert report["images"] == len(report["choices"]) == 4
    listed = run("label", "next", str(pool), *words[:4]).splitlines()
    assert [line.split()[0] for line in listed] == [choice["path"] for choice in report["choices"]]
    rows = list(csv.DictReader(out.open(encoding="utf-8")))
    filled = "path,label\n" + "".join(f"{row['path']},{row['guess']}\n" for row in rows)
    out.write_text(filled)
    added = json.loads(run("label", "import", str(out), "--out", str(tmp_path / "labels.csv"), "--json"))
    assert added["added"] == 4
    assert len(open_data(tmp_path / "labels.csv", "all", root=pool)) == 4


def test_the_advice_asks_for_labels_of_classes_that_have_none() -> None:
    forecast = Forecast(40, 0.9, (0.8, 0.95), 0.004, (-0.06, 0.07))
    advice = describe_forecast(forecast, ["owl", "fox"])["advice"]
    assert "owl, fox" in advice
    assert "worth" not in advice
    assert describe_forecast(forecast)["advice"] != advice
    assert "2 more" in describe_forecast(forecast, list("abcde"))["advice"]
