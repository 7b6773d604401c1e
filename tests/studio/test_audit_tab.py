"""The Audit tab without a browser."""

import dataclasses

import pytest
from studio_state import backbone, state

from dear.data import few_shot
from dear.data.world_images import world_task
from dear.errors import UsageError
from dear.methods import build_method
from dear.studio.audit import Auditor, answers_html, audit_html


@pytest.fixture
def auditor(tmp_path):
    opened = state(tmp_path, trained=False)
    images = few_shot(world_task("shortcut-place", "train"), 4, 1)
    model = build_method("zeroshot", backbone(), images.classes, template=images.template)
    opened.use(model, "zero-shot", images)
    return Auditor(opened)


def test_a_concept_is_audited_and_shown(auditor):
    found = auditor.find("location")
    html = audit_html(found)
    assert found.concepts[0].name == "Location"
    assert found.concepts[0].sentence.split(" (")[0] in html
    assert "beach" in html
    with pytest.raises(UsageError, match="smell"):
        auditor.find("smell")


def test_own_images_with_and_without(auditor):
    test = world_task("shortcut-place", "test")
    shown = auditor.answers([("<b>one</b>", test.image(0))], "location")
    html = answers_html("location", shown)
    assert "with:" in html
    assert "without:" in html
    assert "<b>one</b>" not in html
    plain = answers_html(
        "location", auditor.answers([("one", test.image(0))], "location", without_it=False), False
    )
    assert "with:" in plain
    assert "without" not in plain


def test_folders_cannot_be_named_from_other_computers(auditor):
    auditor.state = dataclasses.replace(auditor.state, local=False)
    with pytest.raises(UsageError):
        auditor.find("location", "/etc")
