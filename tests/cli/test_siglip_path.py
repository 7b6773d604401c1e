"""A SigLIP folder through the commands: DeAR's preset `strong`, answers, accuracy, and roles."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import families
import food
import pytest
import sentencepiece
from typed import dear

from dear.heads.corpus import load_corpus
from dear.runs.folder import read_config

VISION = {**families.ODD_VISION, "num_hidden_layers": 6}
TEXT = {**families.ODD_TEXT, "vocab_size": 400, "max_position_embeddings": 64}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("siglip")
    food.photos(home / "food")
    folder = families.write(families.siglip(VISION, TEXT), home / "tiny-siglip")
    texts = [phrase.text for phrase in load_corpus().phrases[::5]] + ["a photo of a apple pie."] * 3
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=380, character_coverage=1.0, pad_id=0,
        eos_id=1, unk_id=2, bos_id=-1, pad_piece="<pad>", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (folder / "spiece.model").write_bytes(model.getvalue())
    return home


def test_strong_dear_on_a_siglip_folder(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(place)
    status, output = dear(
        "adapt", "--data", "food", "--backbone", "tiny-siglip", "--out", "run", "--recipe", "strong",
        "--epochs", "3", "--no-calibrate",
    )  # fmt: skip
    assert status == 0, output
    assert read_config(place / "run").preset == "strong"
    status, output = dear("predict", "run", "food", "--csv", str(tmp_path / "answers.csv"))
    assert status == 0, output
    rows = list(csv.DictReader((tmp_path / "answers.csv").open()))
    assert len(rows) == 30
    assert {row["answer"] for row in rows} <= {"apple pie", "green salad", "tomato soup"}
    assert dear("evaluate", "run", "--data", "food")[0] == 0


def test_roles_of_a_siglip_tell_how_much_of_the_feature_heads_explain(place: Path, tmp_path: Path) -> None:
    out, corpus = tmp_path / "roles.json", tmp_path / "corpus.txt"
    tagged = list(load_corpus().tags.items())[::60]
    corpus.write_text("".join(f"{text}\t{tag}\n" for text, tag in tagged))
    status, output = dear(
        "roles", "discover", "--backbone", str(place / "tiny-siglip"), "--images", str(place / "food"),
        "--out", str(out), "--concepts", "tags", "--corpus", str(corpus),
    )  # fmt: skip
    assert status == 0, output
    share = json.loads(out.read_text())["evidence"]["linear_share"]
    assert f"{share:.1%}" in output
    assert "exact" not in output
