"""The practitioner's path: a folder of photos in, an adapted classifier out, and what it answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import Colors, mixed_roles, tiny_clip

from dear.clip.variant import matrix_dtype
from dear.errors import CheckpointError, DataError, InputError, RunError, UsageError
from dear.runs.folder import add_metrics, read_config
from dear.runs.model import Model
from dear.tasks.adapt import adapt
from dear.tasks.evaluate import evaluate

CLIP = tiny_clip(dtype=torch.float32)
QUICK = {"epochs": 3, "batch": 4}


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for split, seed in (("train", 0), ("test", 1)):
        images = Colors(each=4, seed=seed)
        for i, label in enumerate(images.labels.tolist()):
            path = root / split / images.classes[label] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            images.image(i).save(path)
    return root


def test_from_a_folder_to_answers(photos: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    steps = []
    result = adapt(
        photos,
        run,
        backbone=CLIP,
        roles=mixed_roles(),
        shots=2,
        recipe=QUICK,
        progress=lambda stage, *a: steps.append(a) if stage == "training" else None,
    )
    assert result.steps == len(steps) == 6  # 3 classes x 2 shots in batches of 4, three times
    assert read_config(run).images == 6
    report = evaluate(run, photos, backbone=CLIP).to_dict("decoupled")
    assert report["images"] == 12
    assert set(report["modes"]) == {"fused", "decoupled"}
    assert report["accuracy"] == report["modes"]["decoupled"]
    assert set(report["per_class"]) == {"red", "green", "blue"}
    files = sorted((photos / "test").rglob("*.png"))[:3]
    answers = Model.of(run, CLIP).answers(files, top=2)
    assert [a.image for a in answers] == [str(f) for f in files]
    assert all(len(a.classes) == 2 and a.classes[0][1] >= a.classes[1][1] for a in answers)
    novel = Model.of(run, CLIP).answers(files, classes=["a sunset", "the sea"], top=9)
    assert sum(p for _, p in novel[0].classes) == pytest.approx(1, abs=1e-5)
    add_metrics(run, test=report)


def test_resume_is_the_same_run(photos: Path, tmp_path: Path) -> None:
    settings = {"backbone": CLIP, "roles": mixed_roles(), "recipe": QUICK}
    adapt(photos, tmp_path / "whole", **settings)
    with pytest.raises(RunError, match="step 2"):
        adapt(photos, tmp_path / "run", **settings, stop=iter([False, True]).__next__)
    adapt(photos, tmp_path / "run", **settings, resume=True)
    both = [(tmp_path / name / "adapter.safetensors").read_bytes() for name in ("whole", "run")]
    assert both[0] == both[1]


def test_what_is_wrong_is_said(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        adapt(tmp_path / "nowhere", backbone=CLIP)
    with pytest.raises(CheckpointError, match=r"no\.pt"):
        adapt(photos, backbone=str(tmp_path / "no.pt"))
    with pytest.raises(UsageError, match="'epoch'"):
        adapt(photos, backbone=CLIP, roles=mixed_roles(), recipe={"epoch": 3})
    run = adapt(photos, backbone=CLIP, method="zeroshot").method
    with pytest.raises(InputError, match=r"missing\.jpg"):
        Model.of(run).answers([tmp_path / "missing.jpg"])
    with pytest.raises(UsageError, match=r"top .*0"):
        Model.of(run).answers([], top=0)


def test_a_cast_backbone_has_16_bit_matrices_and_shares_the_rest() -> None:
    other = CLIP.cast(torch.bfloat16)
    assert other.visual.blocks[0].mlp.up.weight.dtype == torch.bfloat16
    assert other.visual.patch.weight.dtype == torch.bfloat16
    assert CLIP.visual.blocks[0].mlp.up.weight.dtype == torch.float32
    assert other.text.tokens is CLIP.text.tokens
    assert other.fingerprint == CLIP.fingerprint
    pixels = torch.randn(2, 3, 24, 24)
    exact, rough = CLIP.encode_image(pixels), other.encode_image(pixels)
    assert rough.dtype == torch.float32  # the residual stream keeps its precision
    assert 0 < (exact - rough).abs().max() < 0.05


def test_precision_by_name() -> None:
    assert matrix_dtype("auto", torch.device("cpu")) == torch.float32
    with pytest.raises(UsageError, match="'half'"):
        matrix_dtype("half", torch.device("cpu"))
    method = adapt(Colors(), backbone=CLIP, method="zeroshot").method
    bound = method.in_precision("bfloat16")
    assert bound.clip.visual.dtype == torch.bfloat16
    assert method.in_precision("bfloat16").clip is bound.clip  # copied once
    assert method.clip is CLIP
