"""The page of an audit: evidence, escaping, no scripts from elsewhere."""

from __future__ import annotations

from pathlib import Path

import dear
from dear.data import few_shot
from dear.data.world_images import world_task
from dear.methods import build_method
from dear.tasks.audit.evidence import evidence
from dear.tasks.audit.page import audit_page, write_audit_page
from dear.tasks.audit.task import AuditOptions, audit

CLIP = dear.load("mini")
IMAGES = few_shot(world_task("shortcut-place", "train"), 6, 1)


def test_the_page_shows_images_by_class_and_value(tmp_path: Path) -> None:
    found = audit(IMAGES, options=AuditOptions(concepts=("location", "color"), backbone=CLIP))
    assert [finding.association.concept for finding in found.suspects] == ["Location"]
    facts = evidence(found, {"Train without it:": "dear adapt --without location"})
    own = facts.concepts[0]
    assert next(iter(own.images)).startswith("dog: beach in ")
    assert all(image.lines[1][1].startswith("group ") for images in own.images.values() for image in images)
    assert own.map is not None
    gray = [cell for _, cells in own.map.rows for cell in cells if cell["color"] == "#ececec"]
    assert len(gray) == 48 - len(found.findings[0].heads)
    rows = {row[0]: row[1:] for row in own.table.rows}
    assert sum(map(int, rows["dog"])) == 6
    write_audit_page(facts, tmp_path / "audit.html")
    page = (tmp_path / "audit.html").read_text()
    assert "Images by class and value" in page
    assert "dear adapt --without location" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_answers_with_and_without_and_names_are_escaped() -> None:
    names = tuple(f"<b>{name}</b>" for name in IMAGES.classes)
    model = build_method("zeroshot", CLIP, IMAGES.classes, template=IMAGES.template)
    found = audit(IMAGES, model, AuditOptions(concepts=("animal",)))
    assert found.findings[0].verdict == "about the classes"
    assert set(found.without) == {"Animal"}
    import dataclasses

    page = audit_page(evidence(dataclasses.replace(found, images=dataclasses.replace(IMAGES, classes=names))))
    assert "<b>dog</b>" not in page
    assert "&lt;b&gt;dog" in page
