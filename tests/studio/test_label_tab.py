"""The tab Label starts the page of `dear label start`."""

from __future__ import annotations

import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import Colors, tiny_clip

from dear.errors import DataError, UsageError
from dear.methods import ZeroShot
from dear.runs.model import Model
from dear.studio.label import Labeler
from dear.studio.state import StudioState
from dear.tasks.labeling.answers import read_labels


def test_the_tab_serves_the_labeling_page(tmp_path: Path) -> None:
    images = Colors(each=4, seed=1)
    (tmp_path / "pool").mkdir()
    for place in range(len(images)):
        images.image(place).save(tmp_path / "pool" / f"{place}.png")
    clip = tiny_clip(dtype=torch.float32)
    model = Model(ZeroShot(clip, images.classes))
    state = StudioState(clip, None, images, tmp_path, model)
    labeler = Labeler(state)
    with state.servers:
        server = labeler.start(str(tmp_path / "pool"), "red, green", str(tmp_path / "labels.csv"))
        assert server.session.classes == ("red", "green")
        with urllib.request.urlopen(server.url) as page:
            assert b"Check labels" in page.read()
        server.session.answer([0], "label", "red")
        assert list(read_labels(tmp_path / "labels.csv").values()) == ["red"]
        again = labeler.start(str(tmp_path / "pool"), "red, blue", str(tmp_path / "labels.csv"))
        assert again is server
        assert server.session.classes == ("red", "green", "blue")
        (tmp_path / "second").mkdir()
        images.image(0).save(tmp_path / "second" / "only.png")
        other = labeler.start(str(tmp_path / "second"), "", str(tmp_path / "labels.csv"))
        assert other.session.paths == ("only.png",)
        with pytest.raises(DataError, match="nowhere"):
            labeler.start(str(tmp_path / "nowhere"), "", str(tmp_path / "other.csv"))
        with pytest.raises(UsageError):
            labeler.start("", "", "labels.csv")
    with pytest.raises(OSError):
        urllib.request.urlopen(server.url)
    remote = Labeler(replace(state, local=False))
    with pytest.raises(UsageError):
        remote.start(str(tmp_path / "pool"), "", str(tmp_path / "other.csv"))
