"""A folder that cannot be used is told before images, backbone or roles are touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import Colors

from dear.errors import RunError
from dear.tasks.adapt import adapt


def test_a_used_folder_or_a_file_is_refused_first(tmp_path: Path) -> None:
    images = Colors()
    images.image = images.pixels = lambda *given: pytest.fail("an image was read")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match=r"run"):
        adapt(images, tmp_path / "run", backbone="no such backbone")
    with pytest.raises(RunError, match=r"file"):
        adapt(images, tmp_path / "file", backbone="no such backbone")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "file", "run"]
