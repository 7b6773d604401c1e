"""The panel Why of the studio."""

from __future__ import annotations

from pathlib import Path

import pytest
from studio_state import state
from tiny import Colors

from dear.errors import InputError, UsageError
from dear.studio.classify import where_html, why_html


def test_the_first_image_is_explained_among_the_given_classes(tmp_path: Path) -> None:
    own = state(tmp_path)
    images = [("a.png", own.images.image(0))]
    page = why_html(own, images, ["car", "<i>boat</i>"], "a {}.")
    assert "<i>boat" not in page
    assert "&lt;i&gt;boat" in page
    assert page.count("data:image/jpeg") > 5
    assert "Token" in page  # DeAR's tokens are bars of their own


def test_answers_are_compared_with_the_training_images_where_they_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Colors(classes=2, each=3)
    training.classes = ("an image of the training", "another one")
    monkeypatch.setattr("dear.studio.classify.reference_images", lambda model: training)
    own = state(tmp_path)
    page = why_html(own, [("a.png", own.images.image(0))], own.model.classes, "a {}.")
    assert training.classes[0] in page
    monkeypatch.setattr("dear.studio.classify.reference_images", lambda model: None)
    page = why_html(own, [("a.png", own.images.image(0))], own.model.classes, "a {}.")
    assert training.classes[0] not in page


def test_where_shows_one_heatmap(tmp_path: Path) -> None:
    own = state(tmp_path)
    images = [("a.png", own.images.image(0))]
    assert where_html(own, images, "a wheel").count("data:image/jpeg") == 1
    with pytest.raises(UsageError):
        where_html(own, images, "")
    with pytest.raises(InputError):
        why_html(own, [], ["a", "b"], "{}")
