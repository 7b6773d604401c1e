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
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.txt").write_text("x")
    for name, item in (("run", "run"), ("file", "file"), ("photos", r"holiday\.txt")):
        for resume in (False, True) if name != "run" else (False,):
            with pytest.raises(RunError, match=item):
                adapt(images, tmp_path / name, backbone="no such backbone", resume=resume)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        *("config.json", "file", "holiday.txt", "photos", "run")
    ]
