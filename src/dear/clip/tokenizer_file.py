"""Tokenizers that come with a checkpoint: SigLIP's, SigLIP 2's and MetaCLIP 2's.

`tokenizers` (tokenizer.json) or `sentencepiece` (*.model) split a text into pieces. This module adds the
cleaning that the models were trained with, and begin, end and padding tokens. Texts that are too long are
refused, as for CLIP, instead of being truncated.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dear.clip.config import TextConfig
from dear.clip.tokenizer import check_text, fix_encoding, shorten
from dear.errors import CheckpointError, DearError, InputError, reason_of
from dear.utils.files import read_json

JSON = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
PIECES = ("spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
FILES = (JSON, SETTINGS, *PIECES)  #: files of a checkpoint that a tokenizer may consist of

_MAX_BYTES = 200 * 1024 * 1024  # the largest known tokenizer (900,000 pieces) has 61 MB
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACES = re.compile(r"\s+")


def clean(text: str, mode: str) -> str:
    """The text as the published code of a model prepares it.

    "punctuation" is what transformers does for SigLIP, "canonicalize" what OpenCLIP does: they differ on
    underscores, html and damaged encodings.

    >>> clean("A photo_of (2) Cats!", "canonicalize"), clean("A photo_of (2) Cats!", "punctuation")
    ('a photo of 2 cats', 'a photoof 2 cats')
    """
    if mode == "punctuation":
        return _SPACES.sub(" ", text.lower().translate(_PUNCTUATION)).strip()
    if mode == "canonicalize":
        text = fix_encoding(text).strip().replace("_", " ")
        return " ".join(text.translate(_PUNCTUATION).lower().split())
    if mode == "whitespace":
        return _SPACES.sub(" ", fix_encoding(text)).strip()
    return text.lower() if mode == "lower" else text


class FileTokenizer:
    """The tokenizer of a checkpoint's folder, for a text tower's vocabulary, cleaning and end token."""

    def __init__(self, folder: Path, config: TextConfig) -> None:
        self.config = config
        settings = _read_settings(folder / SETTINGS)
        self._encode, count, id_of = _load(_tokenizer_files(folder, config)[0])
        if count > config.vocab:
            raise CheckpointError(
                f"{folder}: the tokenizer must have at most {config.vocab:,} pieces, the rows of the text "
                f"tower, got {count:,}"
            )
        self.end = config.end
        pad = settings.get("pad_token")
        pad = pad.get("content") if isinstance(pad, dict) else pad
        pad_id = id_of(pad) if isinstance(pad, str) else None
        self.pad = self.end if pad_id is None else pad_id

    def __deepcopy__(self, memo: dict[int, Any]) -> FileTokenizer:
        return self  # immutable and large

    def __call__(self, texts: str | Sequence[str], context: int) -> Tensor:
        """Token ids [N, context]: the words, the end token, then padding."""
        rows = [texts] if isinstance(texts, str) else list(texts)
        result = torch.full((len(rows), context), self.pad, dtype=torch.int64)
        for row, text in zip(result, rows, strict=True):
            ids = self._ids(text, context)
            row[: len(ids)] = torch.tensor(ids)
        return result

    def _ids(self, text: str, context: int) -> list[int]:
        check_text(text)
        cleaned = clean(text, self.config.clean)
        ids = self._encode(cleaned) if cleaned.strip() else []
        words = len(ids) - int(self.config.begins)
        if words > 0 and ids[-1] == self.end:
            words -= 1
        elif ids:
            ids = [*ids, self.end]
        if {self.end, self.pad} & set(ids[int(self.config.begins) : -1]):
            raise InputError(f"the text {shorten(text)} contains a special token of the model; remove it")
        if words < 1:
            raise InputError(f"a text must contain a word, got {shorten(text)}")
        if len(ids) > context:
            raise InputError(
                f"a text must have at most {context} tokens, got {len(ids)}: {shorten(text)}; shorten it"
            )
        return ids


def find_tokenizer(folder: Path, config: TextConfig) -> FileTokenizer | None:
    """The tokenizer next to a checkpoint's weights; None if there is none."""
    if not _tokenizer_files(folder, config):
        return None
    return FileTokenizer(folder, config)


def _read_settings(path: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; only its padding token is used."""
    if not path.is_file():
        return {}
    try:
        raw = read_json(path, what="tokenizer configuration", max_bytes=16 * 1024 * 1024)
    except DearError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: a tokenizer configuration must be an object, got {raw!r:.40}")
    return raw


def _tokenizer_files(folder: Path, config: TextConfig) -> list[Path]:
    """The usable files, best first; a bare sentencepiece model has no begin token."""
    names = (JSON,) if config.begins else (JSON, *PIECES)
    return [folder / name for name in names if (folder / name).is_file()]


def _load(path: Path) -> tuple[Any, int, Any]:
    """A function from text to ids, the number of pieces, and a function from a piece to its id or None."""
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise CheckpointError(f"{path}: a tokenizer must have at most {_MAX_BYTES:,} bytes, got {size:,}")
    try:
        return _from_json(path) if path.name == JSON else _from_pieces(path)
    except ImportError as error:
        raise CheckpointError(f"{path}: needs the package {error.name}; install it") from None
    except Exception as error:  # both libraries raise plain exceptions for damaged files
        reason = reason_of(error)[:120]
        raise CheckpointError(f"{path}: is not a complete tokenizer ({reason}); download it again") from None


def _from_json(path: Path) -> tuple[Any, int, Any]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    encode = lambda text: list(tokenizer.encode(text).ids)  # noqa: E731
    return encode, tokenizer.get_vocab_size(), tokenizer.token_to_id


def _from_pieces(path: Path) -> tuple[Any, int, Any]:
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor()
    model.LoadFromSerializedProto(path.read_bytes())
    id_of = lambda piece: None if model.PieceToId(piece) == model.unk_id() else model.PieceToId(piece)  # noqa: E731
    return lambda text: list(model.EncodeAsIds(text)), model.GetPieceSize(), id_of
