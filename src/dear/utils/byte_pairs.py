"""CLIP's byte-pair encoding of cleaned text, by `tokenizers` and the merges that OpenAI published with CLIP.

`clip_merges.txt.gz` holds the 48,894 merges that CLIP uses, the first of `bpe_simple_vocab_16e6.txt` in
https://github.com/openai/CLIP (MIT license).
"""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import Any

_MERGES = Path(__file__).with_name("clip_merges.txt.gz")
_WORDS = r"(?i)'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_END_OF_WORD = "</w>"


def encode(text: str) -> list[int]:
    """Token ids of a text in lower case, without begin and end token.

    U+0345 (a combining iota) separates words: no branch of CLIP's word pattern matches it.

    >>> encode("a photo of a cat.")
    [320, 1125, 539, 320, 2368, 269]
    """
    ids: list[int] = _tokenizer().encode(text.replace("\u0345", " ")).ids
    return ids


@cache
def _tokenizer() -> Any:
    """The tokenizer, built once: that takes longer than encoding thousands of texts."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    lines = gzip.decompress(_MERGES.read_bytes()).decode("utf-8").splitlines()
    pairs = (line.split() for line in lines[1:])  # the first line describes the file
    merges = [(first, second) for first, second in pairs]
    letters = _byte_letters()
    units = [*letters, *(letter + _END_OF_WORD for letter in letters), *map("".join, merges)]
    vocabulary = {unit: number for number, unit in enumerate(units)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, end_of_word_suffix=_END_OF_WORD))
    words = Split(Regex(_WORDS), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])
    return tokenizer


def _byte_letters() -> list[str]:
    """CLIP's letters of the 256 bytes, in the order of its vocabulary: printable bytes come first."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]
