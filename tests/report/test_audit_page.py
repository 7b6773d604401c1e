"""The page of an audit: evidence, escaping, no scripts from elsewhere; the table and the notebook view."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import dear
from dear.data import few_shot
from dear.data.world_images import world_task
from dear.methods import build_method
from dear.tasks.audit.findings import CLASS_DEFINING
from dear.tasks.audit.page import AuditPage, audit_page
from dear.tasks.audit.task import audit

CLIP = dear.load("mini")
IMAGES = few_shot(world_task("shortcut-place", "train"), 6, 1)


def test_the_page_shows_images_by_class_and_value(tmp_path: Path) -> None:
    result = audit(data=IMAGES, concept=("location", "color"), backbone=CLIP)
    assert [finding.name for finding in result.suspects] == ["Location"]
    result = dataclasses.replace(result, data="places & more")
    page, location = AuditPage(result, {}), result.concepts[0]
    galleries = page.concept_images(location)
    assert next(iter(galleries)).startswith("dog: beach in ")
    places = [image.lines for images in galleries.values() for image in images]
    colors = [image.lines for images in page.concept_images(result.concepts[1]).values() for image in images]
    assert all(len(lines) == 1 for lines in places)  # the group is the value that the model sees
    assert all(lines[1][1].startswith("group ") for lines in colors)
    heads = page.head_map(location)
    assert heads is not None
    gray = [cell for _, cells in heads.rows for cell in cells if cell["color"] == "#ececec"]
    assert len(gray) == 48 - len(location.heads)
    rows = {row[0]: row[1:] for row in page.value_table(location).rows}
    assert sum(map(int, rows["dog"])) == 6
    assert ("1", "finding to act on") in page.tiles
    result.write_page(tmp_path / "audit.html")
    text = (tmp_path / "audit.html").read_text()
    assert "Images by class and value" in text
    assert "dear adapt --data &#39;places &amp; more&#39; --without location" in text
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_answers_with_and_without_and_names_are_escaped() -> None:
    names = tuple(f"<b>{name}</b>" for name in IMAGES.classes)
    model = build_method("zeroshot", CLIP, IMAGES.classes, template=IMAGES.template)
    result = audit(model, IMAGES, concept="animal")
    assert result.findings[0].verdict == CLASS_DEFINING
    assert set(result.without) == {"Animal"}
    page = audit_page(dataclasses.replace(result, images=dataclasses.replace(IMAGES, classes=names)))
    assert "<b>dog</b>" not in page
    assert "&lt;b&gt;dog" in page


def test_a_table_and_a_notebook_view() -> None:
    result = audit(data=IMAGES, concept=("location", "color"), backbone=CLIP)
    frame = result.to_frame()
    assert frame["name"].tolist() == ["Location", "Color"]
    assert frame["suspected"].tolist() == [True, False]
    html = result._repr_html_()
    assert "<html" not in html
    assert result.concepts[0].sentence.split(" (")[0] in html
