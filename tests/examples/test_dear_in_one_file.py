"""The one-file DeAR computes what the package's `paper` preset computes, step by step."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from tiny import Colors, mixed_roles, tiny_clip, token_ids
from transformers import CLIPModel

import dear
from dear.clip.checkpoint import save_hf
from dear.heads.roles import RoleMap
from dear.methods import DeAR
from dear.runs.recipe import Recipe
from dear.train.feed import Feed
from dear.train.loop import Loop

FILE = Path(__file__).resolve().parents[2] / "examples" / "dear_in_one_file.py"
PAPER = DeAR.preset("paper")
NAMES = {"tokens": "r_AD", "text_tokens": "text_KD", "p_attr": "P_attr_DE", "v": "v"}


@pytest.fixture(scope="module")
def one_file():
    spec = importlib.util.spec_from_file_location("dear_in_one_file", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random CLIP as transformers reads it, roles, and a tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    save_hf(tiny_clip(dtype=torch.float32), folder)
    mixed_roles().save(folder / "roles.json")
    letters = "abcdefghijklmnopqrstuvwxyz."
    vocab = {letter + end: i for i, (letter, end) in enumerate((a, b) for a in letters for b in ("", "</w>"))}
    vocab |= {"<|startoftext|>": 49_406, "<|endoftext|>": 49_407}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


class RecordedDeAR(DeAR):
    """Keeps the batches and losses of its training."""

    def build(self, generator):
        super().build(generator)
        self.pixels, self.labels, self.losses = [], [], []

    def frozen_stage(self, pixels):
        self.pixels.append(pixels)
        return super().frozen_stage(pixels)

    def loss_from_frozen(self, frozen, labels, domains=None):
        loss = super().loss_from_frozen(frozen, labels, domains)
        self.labels.append(labels)
        self.losses.append(loss.total.item())
        return loss


class Epochs:
    """Recorded batches, an epoch at each iteration."""

    def __init__(self, batches, steps_per_epoch):
        self.rest, self.steps = iter(batches), steps_per_epoch

    def __len__(self):
        return self.steps

    def __iter__(self):
        return (next(self.rest) for _ in range(self.steps))


def build_twins(one_file, folder, kind=DeAR):
    """The package's DeAR and the one-file DeAR on the same weights, with the same initial tensors."""
    images, ids = Colors(each=12), token_ids()
    roles = RoleMap.load(folder / "roles.json")
    packaged = kind(dear.load(folder), images.classes, roles=roles, ids=ids, **PAPER.options)
    literal = one_file.DeAR(
        CLIPModel.from_pretrained(folder), ids, *one_file.read_roles(folder / "roles.json")
    )
    with torch.no_grad():
        for name, parameter in packaged.named_parameters():
            getattr(literal, NAMES[name]).copy_(parameter)
    return packaged, literal, images


def test_losses_are_those_of_the_paper_preset_step_by_step(one_file, folder):
    packaged, literal, images = build_twins(one_file, folder, RecordedDeAR)
    recipe = Recipe.of(DeAR, **PAPER.recipe, precision="float32")
    feed = Feed(images, packaged.clip, recipe)
    Loop(packaged, feed, recipe).run()
    assert len(packaged.losses) == len(packaged.pixels) == 30  # 10 epochs of 36 images in batches of 16
    batches = zip(packaged.pixels, packaged.labels, strict=True)
    losses = list(one_file.train(literal, Epochs(batches, feed.steps_per_epoch)))
    assert losses == pytest.approx(packaged.losses, abs=1e-5)
    assert min(losses[-3:]) < losses[0] - 0.05  # it learned, so the comparison covers more than the start
    pixels = packaged.pixels[0]
    for scores, mode in zip(literal.predict(pixels), ("fused", "decoupled"), strict=True):
        expected = packaged.logits(pixels, mode)
        scale = 1 if mode == "fused" else packaged.clip.logit_scale
        assert (scale * scores - expected).abs().max() < 1e-3


def test_learned_tensors_are_those_of_the_paper(one_file, folder):
    packaged, literal, _ = build_twins(one_file, folder)
    learned = {name: p.shape for name, p in literal.named_parameters() if p.requires_grad}
    assert learned == {NAMES[name]: p.shape for name, p in packaged.named_parameters()}


@pytest.mark.parametrize("kind", ["generalization", "other", "core", "mixed"])
def test_role_masks_follow_the_equations(one_file, kind):
    attributes, n = ["Color", "Shape", "Texture"], 4
    mask = one_file.role_mask(kind, "Shape", attributes, n)
    for i in range(7):
        for j in range(7):
            original, key_original = i < n, j < n
            hidden = {
                "generalization": original != key_original,
                "other": original != key_original,
                "core": not key_original and j != n + 1,
                "mixed": False,
            }[kind]
            assert mask[i, j] == (-torch.inf if hidden else 0.0)


def test_the_script_trains_on_a_folder(one_file, folder, tmp_path, monkeypatch, capsys):
    images = Colors(each=6)
    for index, label in enumerate(images.labels.tolist()):
        split = "train" if index % 2 else "test"
        path = tmp_path / split / images.classes[label] / f"{index}.PNG"
        path.parent.mkdir(parents=True, exist_ok=True)
        images.image(index).resize((40, 30)).save(path)
    (tmp_path / "train" / "red" / "notes.txt").write_text("not an image")
    arguments = ["dear_in_one_file.py", str(tmp_path / "train"), str(tmp_path / "test")]
    arguments += ["--backbone", str(folder), "--roles", str(folder / "roles.json")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--out", str(tmp_path / "dear.pt")])
    one_file.main()
    *steps, last = capsys.readouterr().out.splitlines()
    assert len(steps) == 10  # 9 images: one step per epoch
    assert "accuracy on 9 images" in last
    assert set(torch.load(tmp_path / "dear.pt")) == set(NAMES.values())


def test_flips_and_crops_stay_inside_the_image(one_file, tmp_path):
    (tmp_path / "red").mkdir()
    Image.new("RGB", (90, 20), (255, 0, 0)).save(tmp_path / "red" / "wide.jpg", quality=100)
    for augment in (True, False):
        pixels, label = one_file.Photos(tmp_path, ["red"], 16, augment)[0]
        assert pixels.shape == (3, 16, 16)
        assert label == 0
        red = (pixels[0] * one_file.STD[0] + one_file.MEAN[0]).min()
        assert red > 0.95
