"""Images of one folder help each other: `predict(..., together=True)`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import Colors, tiny_clip

from dear.errors import UsageError
from dear.tasks.adapt import adapt
from dear.tasks.predict import predict

CLIP = tiny_clip(dtype=torch.float32)


def test_images_help_each_other(tmp_path: Path) -> None:
    run = adapt(Colors(each=4, seed=0), tmp_path / "run", backbone=CLIP, method="proker")
    images = Colors(each=5, seed=1)
    for place in range(len(images)):
        images.image(place).save(tmp_path / f"{place:02}.png")
    (tmp_path / "bad.png").write_bytes(b"x")
    alone = predict(run, tmp_path / "*.png", reject=0.05)
    joint = predict(run, tmp_path / "*.png", reject=0.05, together=True)
    assert [answer.image for answer in joint] == [answer.image for answer in alone]
    assert [answer.rejected for answer in joint] == [answer.rejected for answer in alone]
    assert [answer.error for answer in joint] == [answer.error for answer in alone]
    readable = [answer for answer in joint if answer.error is None]
    assert all(sum(value for _, value in answer.classes) == pytest.approx(1, abs=1e-4) for answer in readable)
    names = [images.classes[label] for label in images.labels.tolist()]
    right = sum(answer.classes[0][0] == name for answer, name in zip(readable, names, strict=True))
    assert right >= sum(
        a.classes[0][0] == n for a, n in zip([a for a in alone if not a.error], names, strict=True)
    )
    assert [a.classes for a in readable] != [a.classes for a in alone if not a.error]
    with pytest.raises(UsageError, match="classes"):
        predict(run, tmp_path / "*.png", classes="cat", together=True)
    uncalibrated = adapt(Colors(each=4, seed=0), backbone=CLIP, method="proker", calibrate=False)
    with pytest.raises(UsageError, match="calibrate"):
        predict(uncalibrated, tmp_path / "*.png", together=True)
