"""Several texts per class: means on the unit sphere, for every method, saved runs, and new classes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import dear
from dear.data.texts import read_texts, resolve_texts
from dear.errors import DataError, DearError
from dear.methods import METHODS, build_method
from dear.methods.texts import ClassTexts
from dear.runs.model import Model

CLASSES = ("stripes", "dots", "zigzag")
TEXTS = {
    "stripes": ("A surface with long parallel lines.", "a photo of a striped pattern."),
    "dots": ("Many small round spots.",),
    "zigzag": ("a photo of a zigzag.", "Sharp turns from left to right.", "a photo of a chevron."),
}


@pytest.fixture(scope="module")
def clip() -> dear.Clip:
    return dear.load("mini")


def oracle(clip: dear.Clip, sentences: tuple[str, ...]) -> torch.Tensor:
    rows = [clip.encode_text([sentence])[0] for sentence in sentences]
    total = sum(row / row.norm() for row in rows)
    return total / total.norm()


def roles_of(name: str, clip: dear.Clip) -> dear.RoleMap | None:
    from dear.heads.known_roles import known_roles

    return known_roles(clip) if METHODS[name].uses_roles else None


def test_mean_on_the_unit_sphere(clip: dear.Clip) -> None:
    method = build_method("zeroshot", clip, CLASSES, texts=ClassTexts(TEXTS))
    for row, name in zip(method.prompts.frozen, CLASSES, strict=True):
        assert torch.allclose(row, oracle(clip, TEXTS[name]), atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_reads_them(name: str, clip: dear.Clip) -> None:
    """One text equal to the prompt changes nothing; others change what reads texts."""
    roles = roles_of(name, clip)
    size = clip.config.vision.image_size
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    prompt = ClassTexts({one: (f"a photo of a {one}.",) for one in CLASSES})
    plain, same, other = (
        build_method(name, clip, CLASSES, roles=roles, texts=texts).logits(pixels)
        for texts in (None, prompt, ClassTexts(TEXTS))
    )
    assert torch.allclose(plain, same, atol=2e-3)
    if name not in ("linear-probe",):
        assert not torch.allclose(plain, other, atol=1e-2)


def test_synonyms_are_texts(clip: dear.Clip) -> None:
    synonyms = build_method("zeroshot", clip, ["cat|kitty", "dog"]).prompts
    expected = oracle(clip, ("a photo of a cat.", "a photo of a kitty."))
    assert torch.allclose(synonyms.frozen[0], expected, atol=1e-6)
    assert torch.allclose(synonyms.frozen[1], oracle(clip, ("a photo of a dog.",)), atol=1e-6)


@pytest.fixture(scope="module")
def texts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = dear.open_data("world:textures", "train")
    entries = {name: [f"The surface is {name}.", name] for name in images.classes}
    path = tmp_path_factory.mktemp("texts") / "texts.json"
    path.write_text(json.dumps({**entries, "marble": ["Veined polished stone."]}))
    return path


def test_a_run_keeps_them(texts_file: Path, tmp_path: Path) -> None:
    run = dear.adapt("world:textures", tmp_path / "run", method="kgcoop", shots=1, epochs=1, texts=texts_file,
                     calibrate=False, check=False)  # fmt: skip
    assert run.spec is not None
    first = run.classes[0]
    assert run.spec.texts[first] == (f"The surface is {first}.", run.template.replace("{}", first))
    images = dear.open_data("world:textures", "test").subset(range(8))
    loaded = Model.load(tmp_path / "run")
    assert torch.equal(run.probabilities(images), loaded.probabilities(images))
    more = loaded.with_classes(["marble"], add=True).method
    assert torch.allclose(
        more.prompts.frozen[-1], oracle(loaded.clip, ("Veined polished stone.",)), atol=1e-6
    )
    (tmp_path / "run" / "texts.safetensors").write_bytes(b"")
    with pytest.raises(DearError, match=r"texts\.safetensors"):
        Model.load(tmp_path / "run")


def test_they_decide_the_training(texts_file: Path) -> None:
    plain = dear.adapt("world:textures", method="zeroshot", shots=1, calibrate=False, check=False)
    texts = dear.adapt(
        "world:textures", method="zeroshot", shots=1, calibrate=False, check=False, texts=texts_file
    )
    assert plain.spec is not None
    assert texts.spec is not None
    assert plain.spec.key != texts.spec.key
    assert plain.identity != texts.identity


def test_classifier_and_zeroshot_take_them(texts_file: Path, tmp_path: Path) -> None:
    clf = dear.Classifier(method="proker", shots=2, texts=texts_file, calibrate=False).fit("world:textures")
    clf.save(tmp_path / "run")
    again = dear.Classifier.load(tmp_path / "run")
    assert again.texts == clf.run_.spec.texts
    images = dear.open_data("world:textures", "test").subset(range(0, 600, 20))
    expected = dear.adapt(
        "world:textures", method="zeroshot", shots=1, calibrate=False, check=False, texts=texts_file
    )
    evaluation = dear.zeroshot(images, texts=texts_file)
    assert evaluation.accuracy["default"] == dear.evaluate(expected, images).accuracy["default"]


def test_a_column_of_texts(tmp_path: Path) -> None:
    for number in range(4):
        Image.new("RGB", (8, 8), (60 * number, 0, 0)).save(tmp_path / f"{number}.png")
    lines = ["0.png,red,scarlet;A warm color.", "1.png,red,scarlet", "2.png,black,", "3.png,black,night"]
    (tmp_path / "t.csv").write_text("path,label,texts\n" + "\n".join(lines))
    images = dear.open_data(tmp_path / "t.csv", "all")
    assert images.texts == {"red": ("scarlet", "A warm color."), "black": ("night",)}
    (tmp_path / "t.csv").write_text("path,label,texts\n" + "\n".join([*lines[:3], "3.png,black,"]))
    with pytest.raises(DataError, match=r"t\.csv, row 4, column texts.*'black'"):
        dear.open_data(tmp_path / "t.csv", "all")


def test_a_missing_class_is_named() -> None:
    with pytest.raises(DataError, match="'dots'"):
        resolve_texts({"Stripes": ["A line."]}, ["stripes", "dots"], "a {}.")


@pytest.mark.parametrize("entries", [{"cat": []}, {"cat": [3]}, {"cat": [""]}, {"cat": 5}, {}, {"cat": None}])
def test_malformed_entries(entries: dict[str, object]) -> None:
    with pytest.raises(DataError):
        read_texts(entries)
