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
    zeroshot = adapt(Colors(each=4, seed=0), backbone=CLIP, method="zeroshot")
    with pytest.raises(UsageError, match="classes"):  # its labels would be those of other classes
        predict(zeroshot.with_classes(zeroshot.classes[::-1]), tmp_path / "*.png", together=True)
    uncalibrated = adapt(Colors(each=4, seed=0), backbone=CLIP, method="proker", calibrate=False)
    with pytest.raises(UsageError, match="calibrate"):
        predict(uncalibrated, tmp_path / "*.png", together=True)


def test_a_tree_is_answered_by_the_joint_probabilities() -> None:
    images = Colors(each=5, seed=1)
    run = adapt(
        Colors(each=4, seed=0),
        backbone=CLIP,
        method="proker",
        tree={"warm": ["red"], "cold": ["green", "blue"]},
    )
    joint = predict(run, images, together=True, certain=0.5)
    for answer in joint:
        probabilities = dict(answer.classes)
        sums = {**probabilities, "warm": probabilities["red"]}
        sums["cold"] = probabilities["green"] + probabilities["blue"]
        name, value = answer.node
        assert value == pytest.approx(sums[name], abs=1e-6)
        assert (name == max(probabilities, key=probabilities.__getitem__)) == (
            max(probabilities.values()) >= 0.5
        )
    alone = predict(run, images, certain=0.5)
    assert [answer.node for answer in joint] != [answer.node for answer in alone]
    with pytest.raises(UsageError, match="reject"):
        predict(run, images, together=True, reject=True)
