"""CLIP's tokenizer: cleans and lowercases text, splits it into byte pairs, and adds BOT and EOT.

Characters that were added to Unicode after version 14 may be split differently from CLIP's code, whose result
for them depends on the version of its library.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dear.errors import InputError
from dear.utils.byte_pairs import encode

BOT = 49406
EOT = 49407
PAD = 0
CONTEXT = 77
SPECIAL = ("<|startoftext|>", "<|endoftext|>")
# Far more than 77 tokens can represent, and still cheap to clean.
MAX_CHARACTERS = 20_000

Tokenizer = Callable[[str | Sequence[str], int], Tensor]  #: texts and a context to token ids [N, context]

_WHITESPACE = re.compile(r"\s+")


def clean(text: str) -> str:
    r"""The text as CLIP reads it: encoding fixed, html unescaped twice, spaces collapsed, lower case.

    >>> clean("  A&amp;amp;B \n Caf\u00c3\u00a9 ")
    'a&b café'
    """
    return _WHITESPACE.sub(" ", fix_encoding(text)).strip().lower()


def fix_encoding(text: str) -> str:
    """The text with its encoding fixed by ftfy and html unescaped twice."""
    if text.isascii() and text.isprintable() and "&" not in text:
        return text
    import ftfy  # imported here: it is slow, and most texts do not need it

    return html.unescape(html.unescape(ftfy.fix_text(text)))


def tokenize(texts: str | Sequence[str], context: int = CONTEXT) -> Tensor:
    """Tokens of one or several texts, int64 [N, context]: BOT, the words, EOT, then zeros.

    >>> tokenize("a cat")[0, :5].tolist()
    [49406, 320, 2368, 49407, 0]
    """
    rows = [texts] if isinstance(texts, str) else list(texts)
    result = torch.full((len(rows), context), PAD, dtype=torch.int64)
    for row, text in zip(result, rows, strict=True):
        ids = [BOT, *_word_ids(text, context), EOT]
        row[: len(ids)] = torch.tensor(ids)
    return result


def check_text(text: str) -> None:
    """Refuse values that are not texts, and texts that are too long for any context."""
    if not isinstance(text, str):
        raise InputError(f"a text must be a str, got {shorten(text)}")
    if len(text) > MAX_CHARACTERS:
        raise InputError(
            f"a text must have at most {MAX_CHARACTERS:,} characters, got {len(text):,}: {shorten(text)}"
        )


def _word_ids(text: str, context: int) -> list[int]:
    """Token ids of a text, at most `context` - 2."""
    check_text(text)
    cleaned = clean(text)
    for special in SPECIAL:
        if special in cleaned:
            raise InputError(f"the text {shorten(text)} contains CLIP's special token {special}; remove it")
    ids = encode(cleaned)
    if not ids:
        raise InputError(f"a text must contain a word, got {shorten(text)}")
    if len(ids) > context - 2:
        raise InputError(
            f"a text must have at most {context - 2} tokens, got {len(ids)}: {shorten(text)}; shorten it"
        )
    return ids


def shorten(value: object, limit: int = 80) -> str:
    """The `repr` of a value for messages, without its middle part if it is long.

    >>> shorten("x" * 1000, 20)
    "'xxxxxxxx…xxxxxxxxx'"
    """
    quoted = repr(value)
    if len(quoted) <= limit:
        return quoted
    half = (limit - 1) // 2
    return f"{quoted[:half]}…{quoted[-(limit - 1 - half) :]}"
