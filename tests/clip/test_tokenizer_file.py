"""Tokenizers that come with a checkpoint: ids are those of the libraries, and damaged files are refused."""

from __future__ import annotations

import io
import json
import string
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import SiglipTokenizer

from dear.clip.config import ClipConfig, TextConfig
from dear.clip.tokenizer_file import FileTokenizer, clean, find_tokenizer
from dear.errors import CheckpointError, InputError

WORDS = """a photo of the red cat dog house über straße Müller façade naïve Ærø ЖИЗНЬ кошка 猫 狗 東京
日本 고양이 قطة חתול बिल्ली แมว ελληνικά γάτα ñandú 1,234.5 € 100% C++ don't it's under_score
semi;colon (brackets) [x] "quoted" emoji🙂 zero\u200bwidth tab\tnewline ﬁne ① ½ İstanbul ß ſ ＡＢＣ　全角
e-mail@example.org https://example.org/?q=1"""
TEXTS = [
    f"{w} {v}".strip() for i, w in enumerate(WORDS.split()) for v in ("", *WORDS.split()[i : i + 12 : 3])
]
TEXTS = [text for text in TEXTS if clean(text, "canonicalize").strip() and "\u200b" not in text]
CORPUS = [*TEXTS, *(clean(text, "canonicalize") for text in TEXTS)]
SIGLIP = replace(ClipConfig.named("ViT-B-16-SigLIP").text, vocab=400)
GEMMA = replace(ClipConfig.named("ViT-B-16-SigLIP2").text, vocab=1000)
XLM = TextConfig(width=8, layers=1, heads=1, vocab=1000, pool="end", end=2, clean="none")


@pytest.fixture(scope="module")
def pieces() -> bytes:
    """A small sentencepiece model with SigLIP's special ids: </s> is 1, <unk> is 2."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3), model_writer=model, vocab_size=380, character_coverage=1.0,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, pad_piece="<pad>", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return model.getvalue()


def write_gemma(folder: Path) -> Tokenizer:
    """A byte-fallback BPE built as Gemma's: <pad> 0, <eos> 1, spaces as ▁, end token behind every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokenizer.train_from_iterator(
        [text.lower() for text in CORPUS], trainers.BpeTrainer(vocab_size=900, special_tokens=special)
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": {"content": "<pad>"}}))
    return tokenizer


def test_siglip_ids_are_those_of_transformers(tmp_path: Path, pieces: bytes) -> None:
    (tmp_path / "spiece.model").write_bytes(pieces)
    theirs = SiglipTokenizer(
        str(tmp_path / "spiece.model"), eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )
    ours = FileTokenizer(tmp_path, SIGLIP)
    assert len(TEXTS) > 150
    expected = theirs(TEXTS, padding="max_length", max_length=64, return_tensors="pt").input_ids
    ids = ours(TEXTS, 64)
    wrong = [text for text, a, b in zip(TEXTS, ids, expected, strict=True) if not torch.equal(a, b)]
    assert wrong == []


def test_gemma_ids_are_those_of_the_library_on_lower_case(tmp_path: Path) -> None:
    library = write_gemma(tmp_path)
    ids = FileTokenizer(tmp_path, GEMMA)(TEXTS, 64)
    library.enable_padding(pad_id=0, length=64)
    expected = torch.tensor([library.encode(text.lower()).ids for text in TEXTS])
    assert torch.equal(ids, expected)


def test_a_tokenizer_with_a_begin_token(tmp_path: Path) -> None:
    library = write_gemma(tmp_path)
    library.post_processor = processors.TemplateProcessing(
        single="<bos> $A <unk>", special_tokens=[("<bos>", 2), ("<unk>", 3)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    config = replace(XLM, end=3)
    rows = FileTokenizer(tmp_path, config)(["a cat", "a photo"], 20)
    for row, text in zip(rows.tolist(), ["a cat", "a photo"], strict=True):
        ids = library.encode(text).ids
        assert row == ids + [0] * (20 - len(ids))


def test_open_clips_canonical_form() -> None:
    every = string.punctuation.replace("_", "")
    assert clean(f"  A_B{every}C  d\n", "canonicalize") == "a bc d"


def test_texts_that_cannot_be_tokens_are_named(tmp_path: Path) -> None:
    write_gemma(tmp_path)
    tokenizer = FileTokenizer(tmp_path, GEMMA)
    with pytest.raises(InputError, match="'   '"):
        tokenizer(["a", "   "], 64)
    with pytest.raises(InputError, match=r"\b8\b.*a photo"):
        tokenizer("a photo of the red cat dog house " * 4, 8)
    with pytest.raises(InputError, match="<eos>"):
        tokenizer("a cat <eos> dog", 64)
    with pytest.raises(InputError, match=r"\b3\b"):
        tokenizer([3], 64)  # type: ignore[list-item]
    with pytest.raises(InputError, match="50,000"):
        tokenizer("a" * 50_000, 64)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b'{"model": 3}'),
        ("tokenizer.json", b"\xff\xfe\x00"),
        ("spiece.model", b""),
        ("spiece.model", b"\x00" * 100),
        ("spiece.model", b"garbage" * 50),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b'{"a": 1, "a": 2}'),
    ],
)
def test_damaged_tokenizers_are_refused(tmp_path: Path, pieces: bytes, name: str, content: bytes) -> None:
    (tmp_path / "spiece.model").write_bytes(pieces)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        FileTokenizer(tmp_path, SIGLIP)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_gemma(tmp_path)
    with pytest.raises(CheckpointError, match=r"\b100\b.*\b650\b"):
        FileTokenizer(tmp_path, replace(GEMMA, vocab=100))


def test_no_file_no_tokenizer(tmp_path: Path, pieces: bytes) -> None:
    assert find_tokenizer(tmp_path, SIGLIP) is None
    (tmp_path / "sentencepiece.bpe.model").write_bytes(pieces)
    assert find_tokenizer(tmp_path, XLM) is None  # a bare model knows no begin token
    assert find_tokenizer(tmp_path, SIGLIP) is not None
