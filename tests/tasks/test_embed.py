"""Features of many images: shards, resuming, unreadable files, and the same by Ray."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import dear
from dear.cli import build_app
from dear.errors import DataError, Interrupted, RunError, UsageError
from dear.tasks.embed import task as embedding
from dear.tasks.embed.sources import open_source
from dear.tasks.embed.task import embed

pd = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(7):
        folder = tmp_path / "photos" / f"day {number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    (tmp_path / "photos/day 1/broken.jpg").write_bytes(b"no image")
    (tmp_path / "photos/notes.txt").write_text("not an image")
    return tmp_path / "photos"


def test_features_are_those_of_the_backbone(photos, tmp_path):
    assert embed(photos, tmp_path / "out", shard=3).computed == 8
    table = pd.read_parquet(tmp_path / "out")
    assert list(table.columns) == ["path", "label", "embedding", "error"]
    assert set(table.label) == {"day 0", "day 1"}
    assert len(table) == 8
    assert table.error.notna().sum() == 1
    assert "broken.jpg" in table[table.error.notna()].path.item()
    clip = dear.load("mini")
    for row in table[table.error.isna()].itertuples():
        pixels = clip.preprocess(Image.open(row.path).convert("RGB"))[None]
        expected = torch.nn.functional.normalize(clip.encode_image(pixels), dim=-1)[0]
        np.testing.assert_allclose(row.embedding, expected.numpy(), atol=1e-5)


def test_what_is_finished_is_not_computed_again(photos, tmp_path, monkeypatch):
    real, calls = embedding.embedder, []

    def breaking(*args):
        compute = real(*args)

        def once(images, rows):
            if calls:
                raise KeyboardInterrupt
            calls.append(rows)
            return compute(images, rows)

        return once

    monkeypatch.setattr(embedding, "embedder", breaking)
    with pytest.raises(Interrupted):
        embed(photos, tmp_path / "out", shard=3)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"part-000000.parquet", "_shards.json"}
    monkeypatch.setattr(embedding, "embedder", real)
    assert embed(photos, tmp_path / "out", shard=3).computed == 5
    assert embed(photos, tmp_path / "out", shard=3).computed == 0
    assert len(pd.read_parquet(tmp_path / "out")) == 8


def test_another_question_in_the_same_folder_is_refused(photos, tmp_path):
    embed(photos, tmp_path / "out", shard=3)
    with pytest.raises(RunError, match="shard_images"):
        embed(photos, tmp_path / "out", shard=4)
    (photos / "day 0/0.png").unlink()
    with pytest.raises(RunError, match="images, digest"):
        embed(photos, tmp_path / "out", shard=3)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("mine")
    with pytest.raises(RunError, match=r"letter.txt"):
        embed(photos, tmp_path / "mine")


def test_an_empty_folder_and_what_a_killed_process_left_are_accepted(photos, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "._shards.json.x.part").write_text("")
    assert embed(photos, tmp_path / "out").computed == 8


def test_labels_and_splits_stay(photos, tmp_path):
    for split in ("train", "test"):
        (tmp_path / "split" / split / "red_fox").mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / "split" / split / "red_fox" / "a.png")
    embed(tmp_path / "split", tmp_path / "out")
    table = pd.read_parquet(tmp_path / "out")
    assert table.label.tolist() == ["red fox"] * 2
    assert table.split.tolist() == ["test", "train"]
    rows = {"path": ["split/test/red_fox/a.png"], "label": ["fox"], "split": ["val"], "note": ["x"]}
    pd.DataFrame(rows).to_csv(tmp_path / "list.csv", index=False)
    frame = embed(tmp_path / "list.csv").to_frame()
    assert list(frame.columns) == ["path", "label", "split", "embedding", "error"]
    assert frame.label.tolist() == ["fox"]


def test_in_memory_and_from_the_cache(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("DEAR_CACHE", str(tmp_path / "cache"))
    found = embed(photos)
    assert found.features.shape == (8, 128)
    assert np.isnan(found.features).any(axis=1).sum() == 1

    def refuse(*args, **options):
        raise AssertionError("computed again")

    clip = dear.load("mini")
    monkeypatch.setattr(type(clip), "encode_image", refuse)
    good = [
        path for path, error in zip(found.columns["path"], found.columns["error"], strict=True) if not error
    ]
    again = embed(good, backbone=clip).features
    np.testing.assert_array_equal(again, found.features[~np.isnan(found.features).any(axis=1)])


def test_tables_and_answers_of_a_run(photos, tmp_path):
    names = [str(path.relative_to(tmp_path)) for path in sorted(photos.rglob("*.png"))]
    pd.DataFrame({"path": names}).to_csv(tmp_path / "list.csv", index=False)
    pd.DataFrame({"path": names}).to_parquet(tmp_path / "list.parquet")
    assert [open_source(tmp_path / f"list.{kind}").names for kind in ("csv", "parquet")] == [
        [str(tmp_path / name) for name in names]
    ] * 2
    clf = dear.Classifier(method="zeroshot", backbone="mini", template="a {} thing", shots=2)
    clf.fit("world:textures").save(tmp_path / "run")
    embed(tmp_path / "list.csv", tmp_path / "out", run=str(tmp_path / "run"), thumbnails=True)
    table = pd.read_parquet(tmp_path / "out")
    files = [str(tmp_path / name) for name in names]
    assert table.answer.tolist() == list(clf.predict(files))
    best = np.sort(clf.predict_proba(files), axis=1)[:, ::-1]
    np.testing.assert_allclose(table.probability, best[:, 0], atol=1e-5)
    np.testing.assert_allclose(table.margin, best[:, 0] - best[:, 1], atol=1e-5)
    np.testing.assert_allclose(np.stack(table.embedding), embed(files).features, atol=1e-6)
    assert Image.open(io.BytesIO(table.image[0]["bytes"])).size == (50, 40)


def test_wrong_sources(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "no-path.csv").write_text("file\na.png\n")
    for source in ("empty", "nowhere", "no-path.csv"):
        with pytest.raises(DataError, match=source):
            embed(tmp_path / source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty/a.png").write_bytes(b"")
    with pytest.raises(UsageError, match="spark"):
        embed(tmp_path / "empty", tmp_path / "out", engine="spark")


def test_the_command(photos, tmp_path):
    result = CliRunner().invoke(
        build_app(), ["embed", "--data", str(photos), "--out", str(tmp_path / "f.parquet")]
    )
    assert "8 images" in result.output
    assert result.exit_code == 0


def pack(path, members):
    """A tar of (name, bytes or a TarInfo type) members."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes) and len(content) > 1:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            else:
                member.type, member.linkname = content, "/etc/passwd"
                tar.addfile(member)
    return path


def test_tars_and_parquet_images_have_the_features_of_their_files(photos, tmp_path):
    files = sorted(photos.rglob("*.png"))
    labels = [{"a.cls": b"red_fox"}, {"a.json": json.dumps({"label": 7}).encode()}, {"a.txt": b"cat\n"}, {}]
    members = []
    for number, (file, label) in enumerate(zip(files, labels, strict=False)):
        members.append((f"day/{number}.png", file.read_bytes()))
        members += [(f"day/{number}.{name.split('.')[1]}", text) for name, text in label.items()]
    expected = embed(files[:4]).features
    found = embed(pack(tmp_path / "photos.tar", members), tmp_path / "out")
    assert found.columns["path"] == [f"day/{number}.png" for number in range(4)]
    assert found.columns["label"] == ["red_fox", "7", "cat", None]
    np.testing.assert_array_equal(found.features, expected)
    cells = [{"bytes": file.read_bytes(), "path": None} for file in files[:4]]
    pd.DataFrame({"image": cells, "split": ["train"] * 4}).to_parquet(tmp_path / "cells.parquet")
    again = embed(tmp_path / "cells.parquet")
    np.testing.assert_array_equal(again.features, expected)
    assert again.columns["split"] == ["train"] * 4
    labeled = pack(tmp_path / "labeled.tar", members[:6])
    assert dear.open_data(labeled, "all").classes == ("7", "cat", "red fox")
    with pytest.raises(DataError, match=r"day/3\.png"):
        dear.open_data(tmp_path / "photos.tar", "all")


@pytest.mark.parametrize(
    ("members", "word"),
    [
        ([("a.jpg", tarfile.SYMTYPE)], "a.jpg"),
        ([("a.jpg", tarfile.LNKTYPE)], "a.jpg"),
        ([("a.jpg", tarfile.CHRTYPE)], "a.jpg"),
        ([("../a.jpg", b"xx")], "../a.jpg"),
        ([("/etc/a.jpg", b"xx")], "/etc/a.jpg"),
        ([("a\x1b[2J.jpg", b"xx")], "control"),
        ([("a.jpg", b"xx"), ("a.png", b"xx")], "a.png"),
        ([("a.jpg", b"xx"), ("a.json", b"[1")], "a"),
        ([("a.jpg", b"xx"), ("a.json", b'{"label": [1]}')], "label"),
        ([("a.jpg", b"xx"), ("a.cls", b"\xff\xfe")], "a.cls"),
        ([("a.txt", b"no image")], r"x\.tar"),
    ],
)
def test_hostile_tars_are_named(tmp_path, members, word):
    path = pack(tmp_path / "x.tar", members)
    with pytest.raises(DataError, match=word.replace("[", r"\[")):
        open_source(path)


def test_truncated_and_oversized_tars_are_rejected(tmp_path, monkeypatch):
    path = pack(tmp_path / "x.tar", [("a.jpg", b"x" * 5000), ("b.jpg", b"y" * 5000)])
    content = path.read_bytes()
    for end in (100, 700, 3000, 9000):
        path.write_bytes(content[:end])
        with pytest.raises(DataError, match=r"x\.tar"):
            open_source(path)
    path.write_bytes(content)
    monkeypatch.setattr("dear.data.tars.MAX_IMAGE", 4000)
    with pytest.raises(DataError, match=r"a\.jpg.*5,000"):
        open_source(path)
