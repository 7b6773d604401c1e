"""The demo on photos: what it writes, and what it says where heads are hardly specialized."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from dear.data.open import open_data
from dear.errors import DataError
from dear.tasks.demo import photos
from dear.tasks.demo.photos import photo_demo, photo_page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of three classes: 8 of each for training, 4 for testing."""
    home = tmp_path_factory.mktemp("photos")
    for split, each in (("train", 8), ("test", 4)):
        images = open_data("world:shortcut-place", split)
        for label, name in enumerate(images.classes[:3]):
            target = home / split / name
            target.mkdir(parents=True)
            for row in (images.labels == label).nonzero()[:each, 0].tolist():
                images.image(row).save(target / f"{row}.png")
    return home


def test_the_page_shows_every_part(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEAR_CACHE", str(tmp_path / "cache"))
    lines: list[str] = []
    demo = photo_demo(tmp_path / "demo", folder, "mini", progress=lines.append)
    assert [line[0] for line in lines if line[0].isdigit()] == ["1", "2", "3", "4", "5"]
    names = {path.name for path in (tmp_path / "demo").iterdir()}
    assert names >= {
        *("index.html", "audit.html", "why.html", "report.html", "heads.html", "results.json"),
        *(f"run-{method}" for method in photos.METHODS),
    }
    page = (tmp_path / "demo" / "index.html").read_text()
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    for accuracy in results["accuracy"].values():
        assert all(f"{100 * value:.1f}%" in page for value in accuracy.values())
    assert all(one.sentence in page for one in demo.explained)
    assert demo.audit.verdict in page
    assert demo.audit.suspects
    assert f"dear repair {tmp_path / 'demo' / 'run-linear-probe'} --without" in page
    for command in (f"dear predict {tmp_path / 'demo' / 'run-proker'} ", f"--data {folder} --backbone mini"):
        assert command in page
    known = demo.roles
    chance = {"bits": 1.2, "rotated": 1.2, "deviation": 0.04, "rotations": 8}
    poor = structs.replace(known, evidence={**known.evidence, "information": chance})
    page = photo_page(replace(demo, roles=poor))
    assert page.count(poor.caveat()) == 1
    assert "dear-map" not in page[page.index("<h1") :]


def test_photos_without_held_out_images_are_refused(folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "photos.csv"
    (tmp_path / "a.png").write_bytes(next((folder / "train").rglob("*.png")).read_bytes())
    table.write_text("path,label,split\na.png,x,train\n")
    with pytest.raises(DataError) as refused:
        photo_demo(tmp_path / "demo", table, "mini")
    assert "photos.csv" in str(refused.value)
    assert not (tmp_path / "demo").exists()
