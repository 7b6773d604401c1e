"""Features of many images: shards, resuming, unreadable files, and the same by Ray."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import dear
from dear.cli import build_app
from dear.errors import DataError, RunError, UsageError
from dear.tasks.embed import task as embedding
from dear.tasks.embed.shards import list_images
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
    assert embed(photos, tmp_path / "out", shard_images=3) == 8
    table = pd.read_parquet(tmp_path / "out")
    assert list(table.columns) == ["path", "embedding", "error"]
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
    with pytest.raises(KeyboardInterrupt):
        embed(photos, tmp_path / "out", shard_images=3)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"part-000000.parquet", "_shards.json"}
    monkeypatch.setattr(embedding, "embedder", real)
    assert embed(photos, tmp_path / "out", shard_images=3) == 5
    assert embed(photos, tmp_path / "out", shard_images=3) == 0
    assert len(pd.read_parquet(tmp_path / "out")) == 8


def test_another_question_in_the_same_folder_is_refused(photos, tmp_path):
    embed(photos, tmp_path / "out", shard_images=3)
    with pytest.raises(RunError, match="shard_images differ"):
        embed(photos, tmp_path / "out", shard_images=4)
    (photos / "day 0/0.png").unlink()
    with pytest.raises(RunError, match="images, digest differ"):
        embed(photos, tmp_path / "out", shard_images=3)
    (tmp_path / "mine").mkdir()
    with pytest.raises(RunError, match="holds no shards"):
        embed(photos, tmp_path / "mine")


def test_tables_and_answers_of_a_run(photos, tmp_path):
    names = [str(path.relative_to(tmp_path)) for path in sorted(photos.rglob("*.png"))]
    pd.DataFrame({"path": names}).to_csv(tmp_path / "list.csv", index=False)
    pd.DataFrame({"path": names}).to_parquet(tmp_path / "list.parquet")
    assert list_images(tmp_path / "list.csv") == list_images(tmp_path / "list.parquet")
    clf = dear.Classifier(method="zeroshot", backbone="mini", template="a {} thing", shots=2)
    clf.fit("world:textures").save(tmp_path / "run")
    embed(tmp_path / "list.csv", tmp_path / "out", run=str(tmp_path / "run"))
    table = pd.read_parquet(tmp_path / "out")
    said = clf.predict([str(tmp_path / name) for name in names])
    assert table["class"].tolist() == list(said)
    assert table.probability.between(0, 1).all()


def test_wrong_sources(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "no-path.csv").write_text("file\na.png\n")
    for source, sentence in (
        ("empty", "empty"),
        ("nowhere", "name a folder"),
        ("no-path.csv", "no column path"),
    ):
        with pytest.raises(DataError, match=sentence):
            embed(tmp_path / source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty/a.png").write_bytes(b"")
    with pytest.raises(UsageError, match="engine 'spark'"):
        embed(tmp_path / "empty", tmp_path / "out", engine="spark")


def test_the_command(photos, tmp_path):
    result = CliRunner().invoke(
        build_app(), ["embed", "--data", str(photos), "--out", str(tmp_path / "f.parquet")]
    )
    assert "8 images computed" in result.output
    assert result.exit_code == 0
