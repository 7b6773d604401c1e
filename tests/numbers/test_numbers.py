"""Numbers: what is none is found where it enters; the same question has the same answer, bit for bit.

What readers of checkpoints and adapters refuse by themselves is tested in tests/hostile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import published
import pytest
import safetensors.torch
import torch
from PIL import Image
from tiny import Colors, mixed_roles, tiny_clip, token_ids

import dear
from dear.clip.checkpoint import read_checkpoint
from dear.clip.factory import build
from dear.data import open_data
from dear.errors import CheckpointError, DearError, InputError, RunError, TrainingError, UsageError
from dear.heads.discover import discover_roles
from dear.methods import DeAR, ZeroShot
from dear.runs.model import Model
from dear.runs.recipe import Recipe
from dear.tasks.adapt import adapt
from dear.train.run import train
from dear.utils import parallel as batches

CLASSES = ("red", "green", "blue")
VISION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 64}
VISION |= {"image_size": 8, "patch_size": 4}
TEXT = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}
TEXT |= {"vocab_size": 40, "eos_token_id": 39, "max_position_embeddings": 6}


def method(clip=None, **options) -> DeAR:
    clip = tiny_clip(dtype=torch.float32) if clip is None else clip
    return DeAR(clip, CLASSES, roles=mixed_roles(), ids=token_ids(), **options)


def files(folder: Path) -> dict[str, bytes]:
    """What a run leaves, without the time it took."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "metrics.json"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return published.write_huggingface(published.random_model(VISION, TEXT, 16), tmp_path / "checkpoint")


def rewrite(folder: Path, **changes: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    safetensors.torch.save_file({**safetensors.torch.load_file(path), **changes}, path)


# --- numbers that are none ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [25.0, 100.0, -30.0, 1e30])
def test_a_temperature_that_overflows_is_found_in_the_checkpoint(checkpoint: Path, scale: float) -> None:
    rewrite(checkpoint, logit_scale=torch.tensor(scale))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: logit_scale"):
        dear.load(checkpoint)


@pytest.mark.parametrize("std", [0.0, 1e-30, -1.0])
def test_a_deviation_that_would_make_pixels_infinite_is_found(checkpoint: Path, std: float) -> None:
    described = {"image_mean": [0.5] * 3, "image_std": [0.2, std, 0.2]}
    (checkpoint / "preprocessor_config.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match="std"):
        dear.load(checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_pixels_that_are_no_numbers_are_named(value: float) -> None:
    clip = tiny_clip(dtype=torch.float32)
    pixels = torch.randn(12, 3, 24, 24)
    pixels[7, 1, 3, 3] = value
    with pytest.raises(InputError, match=r"image 7 .*NaN"):
        discover_roles(clip, pixels, concepts="tags", corpus="world")
    with pytest.raises(InputError, match=r"\[B, 3, 24, 24\]"):
        discover_roles(clip, torch.randn(12, 3, 8, 8), concepts="tags", corpus="world")


def test_scores_that_are_no_numbers_are_told_and_not_counted() -> None:
    model = method()
    with torch.no_grad():
        model.v.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"colors/0000.*fused"):
        Model(model).evaluate(Colors())
    with pytest.raises(TrainingError):
        Model.of(model).answers([Image.new("RGB", (24, 24))])


def test_a_loss_that_is_no_number_stops_training_and_names_its_part(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"step \d+"):
        train(method(), Colors(), Recipe(epochs=3, batch=4, lr=1e30, warmup_epochs=0), tmp_path / "run")


def test_a_saved_state_that_holds_nan_is_not_continued(tmp_path: Path) -> None:
    with pytest.raises(dear.train.Paused):
        train(method(), Colors(), Recipe(epochs=2, batch=4), tmp_path / "run", stop=lambda: True)
    path = tmp_path / "run" / "resume.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        words = file.metadata()
    state = safetensors.torch.load_file(path)
    state["optimizer.0.exp_avg"][0] = float("nan")
    safetensors.torch.save_file(state, path, words)
    with pytest.raises(DearError, match=r"resume\.safetensors: .*'optimizer\.0\.exp_avg'"):
        train(method(), Colors(), Recipe(epochs=2, batch=4), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("change", "item"),
    [
        ({"step": "0"}, "step 0"),
        ({"step": "99"}, "step 99"),
        ({"step": "-1"}, "step -1"),
        ({"step": "two"}, "'two'"),
        ({"parts": "loss"}, "loss"),
    ],
)
def test_a_saved_state_from_nowhere_is_not_continued(tmp_path: Path, change: dict, item: str) -> None:
    with pytest.raises(dear.train.Paused):
        train(method(), Colors(), Recipe(epochs=2, batch=4), tmp_path / "run", stop=lambda: True)
    path = tmp_path / "run" / "resume.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        words = {**file.metadata(), **change}
    safetensors.torch.save_file(safetensors.torch.load_file(path), path, words)
    with pytest.raises(RunError, match=rf"resume\.safetensors: .*{item}"):
        train(method(), Colors(), Recipe(epochs=2, batch=4), tmp_path / "run", resume=True)


# --- float16 -----------------------------------------------------------------------------------------------


def test_weights_that_float16_cannot_hold_are_named(checkpoint: Path) -> None:
    rewrite(checkpoint, **{"vision_model.encoder.layers.1.mlp.fc1.weight": torch.full((64, 64), 1e6)})
    with pytest.raises(UsageError, match=r"visual\.blocks\.1\.mlp\.up\.weight .*bfloat16"):
        dear.load(checkpoint, dtype=torch.float16)
    assert dear.load(checkpoint, dtype=torch.bfloat16).dtype == torch.bfloat16
    found = build(read_checkpoint(checkpoint), "x", torch.device("cpu"), torch.float32)
    assert float(found.visual.blocks[1].mlp.up.weight.max()) == 1e6


def test_a_twin_in_float16_names_the_weight_it_cannot_hold(checkpoint: Path) -> None:
    clip = dear.load(checkpoint)
    clip.visual.blocks[1].mlp.up.weight.fill_(1e6)
    with pytest.raises(UsageError, match=r"visual\.blocks\.1\.mlp\.up .*bfloat16"):
        clip.cast(torch.float16)
    clip.cast(torch.bfloat16)


def test_activations_that_overflow_float16_stop_training_with_what_to_do() -> None:
    clip = tiny_clip(dtype=torch.float32)
    with torch.no_grad():
        clip.visual.blocks[1].mlp.up.weight.mul_(1e4)
        clip.visual.blocks[1].mlp.down.weight.mul_(1e3)
    recipe = Recipe(epochs=1, batch=4, precision="float16")
    with pytest.raises(TrainingError, match="float32"):
        train(method(clip), Colors(), recipe)
    with pytest.raises(TrainingError, match="float16"):
        Model(method(clip), precision="float16").evaluate(Colors())
    assert Model(method(clip)).evaluate(Colors()).accuracy


# --- the same question, the same answer --------------------------------------------------------------------

_TWICE = """
import sys, torch
sys.path.append(sys.argv[2])
torch.set_num_threads(1)
from dear.methods import DeAR
from dear.runs.recipe import Recipe
from dear.train.run import train
from tiny import Colors, mixed_roles, tiny_clip, token_ids
clip = tiny_clip(dtype=torch.float32)
method = DeAR(clip, ("red", "green", "blue"), roles=mixed_roles(), ids=token_ids())
train(method, Colors(), Recipe(epochs=3, batch=4, deterministic=True), sys.argv[1])
"""


def test_deterministic_training_gives_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    recipe = Recipe(epochs=3, batch=4, deterministic=True)
    train(method(), Colors(), recipe, tmp_path / "here")
    torch.rand(17)  # what was drawn before must not matter
    train(method(), Colors(), recipe, tmp_path / "again")
    environment = {**os.environ, "PYTHONHASHSEED": "99", "OMP_NUM_THREADS": "1", "TZ": "Asia/Tokyo"}
    words = [
        sys.executable,
        "-c",
        _TWICE,
        str(tmp_path / "there"),
        str(Path(__file__).parents[1] / "helpers"),
    ]
    subprocess.run(words, env=environment, check=True)
    assert files(tmp_path / "here") == files(tmp_path / "again") == files(tmp_path / "there")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of odd sizes in three classes, some in folders of their own."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(4)
    for name, color in (("red", (200, 30, 30)), ("green", (30, 200, 30)), ("Blue_sky", (30, 30, 200))):
        for number in range(7):
            noise = rng.integers(0, 60, (30 + number, 40 - number, 3))
            place = folder / name / ("inner" if number % 3 == 0 else ".") / f"img{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((noise + np.array(color)).clip(0, 255).astype(np.uint8)).save(place)
    return folder


def trained(photos: Path, out: Path) -> dict[str, bytes]:
    adapt(
        photos,
        out,
        backbone=tiny_clip(dtype=torch.float32),
        roles=mixed_roles(),
        shots=3,
        recipe={"epochs": 2},
    )
    return files(out)


def test_results_do_not_depend_on_the_order_of_files_on_disk(photos, tmp_path, monkeypatch) -> None:
    before = [open_data(photos, split) for split in ("train", "test")]
    expected = trained(photos, tmp_path / "a")
    walk, listed = os.walk, Path.iterdir

    def backwards(top, *args, **options) -> Iterator:
        for place, folders, names in walk(top, *args, **options):
            folders.sort(reverse=True)
            yield place, folders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(sorted(listed(self), reverse=True)))
    assert [p.name for p in photos.iterdir()] != sorted(p.name for p in photos.iterdir())
    for one, other in zip(before, (open_data(photos, split) for split in ("train", "test")), strict=True):
        assert one.paths == other.paths
        assert one.classes == other.classes
        assert torch.equal(one.labels, other.labels)
    assert trained(photos, tmp_path / "b") == expected


@pytest.mark.parametrize("cores", [1, 3, 16])
def test_results_do_not_depend_on_the_number_of_threads_that_decode(
    photos, tmp_path, monkeypatch, cores
) -> None:
    expected = trained(photos, tmp_path / "a")
    pixels = open_data(photos, "all").pixels(range(21), 24)
    monkeypatch.setattr(batches, "usable_cores", lambda: cores)
    assert torch.equal(open_data(photos, "all").pixels(range(21), 24), pixels)
    assert trained(photos, tmp_path / "b") == expected


@pytest.mark.parametrize("batch", [1, 4, 7, 250])
def test_answers_do_not_depend_on_the_batch_of_evaluation(batch: int, monkeypatch) -> None:
    model = method()
    train(model, Colors(), Recipe(epochs=4, batch=4, lr=1e-2))
    whole = Model(model).evaluate(Colors())
    monkeypatch.setattr("dear.data.batches.images_at_once", lambda clip: batch)
    parts = Model(model).evaluate(Colors())
    for mode in model.modes:
        assert torch.equal(whole.answers[mode], parts.answers[mode])
        assert torch.allclose(whole.confidence[mode], parts.confidence[mode], atol=1e-5)
    assert whole.accuracy == parts.accuracy


def test_answers_do_not_depend_on_the_other_images_asked_about() -> None:
    model = ZeroShot(tiny_clip(dtype=torch.float32), CLASSES)
    images = [
        Image.fromarray(np.random.default_rng(n).integers(0, 255, (30, 30, 3), dtype=np.uint8))
        for n in range(9)
    ]
    together = Model.of(model).answers(images, top=3)
    for image, found in zip(images, together, strict=True):
        (alone,) = Model.of(model).answers([image], top=3)
        assert [name for name, _ in alone.classes] == [name for name, _ in found.classes]
        assert np.allclose([p for _, p in alone.classes], [p for _, p in found.classes], atol=1e-5)


def test_any_whole_number_is_a_seed() -> None:
    assert Recipe.of(DeAR, seed=2**40).seed == 2**40
    assert train(method(), Colors(), Recipe(epochs=1, batch=4, seed=2**40)).steps == 3
