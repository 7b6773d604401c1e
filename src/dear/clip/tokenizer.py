"""CLIP's tokens: text is cleaned, lowered, split into words and byte pairs, and framed by BOT and EOT.

Letters that Unicode gained after version 14 may be split into words elsewhere than in CLIP's code, which
itself depends there on the version of the library it runs on.
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
# Far beyond what 77 tokens can hold, and still cheap to clean.
MAX_CHARACTERS = 20_000

_WHITESPACE = re.compile(r"\s+")


def clean(text: str) -> str:
    r"""The text as CLIP sees it: encoding mended, html unescaped twice, spaces collapsed, lower case.

    >>> clean("  A&amp;amp;B \n Caf\u00c3\u00a9 ")
    'a&b café'
    """
    return _WHITESPACE.sub(" ", mended(text)).strip().lower()


def mended(text: str) -> str:
    """The text with its encoding mended and html unescaped twice."""
    if text.isascii() and text.isprintable() and "&" not in text:
        return text
    import ftfy  # here: its import is slow, and most texts do not need it

    return html.unescape(html.unescape(ftfy.fix_text(text)))


def tokenize(texts: str | Sequence[str], context: int = CONTEXT) -> Tensor:
    """Tokens of one or several texts, int64 [N, context]: BOT, the words, EOT, then zeros.

    >>> tokenize("a cat")[0, :5].tolist()
    [49406, 320, 2368, 49407, 0]
    """
    rows = [texts] if isinstance(texts, str) else list(texts)
    result = torch.full((len(rows), context), PAD, dtype=torch.int64)
    for row, text in zip(result, rows, strict=True):
        ids = [BOT, *_checked(text, context), EOT]
        row[: len(ids)] = torch.tensor(ids)
    return result


Tokenizer = Callable[[str | Sequence[str], int], Tensor]  #: texts and a context to token ids [N, context]


def check_text(text: str) -> None:
    """Refuse what is no text, or longer than any context can hold."""
    if not isinstance(text, str):
        raise InputError(f"{shorten(text)} is not a text; give a str or a list of them")
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"the text {shorten(text)} is too long: {len(text):,} characters; shorten it")


def _checked(text: str, context: int) -> list[int]:
    """Token ids of a text that fits between BOT and EOT."""
    check_text(text)
    cleaned = clean(text)
    for special in SPECIAL:
        if special in cleaned:
            raise InputError(f"the text {shorten(text)} contains CLIP's special token {special}; remove it")
    ids = encode(cleaned)
    if not ids:
        raise InputError(f"the text {shorten(text)} is empty once cleaned; give at least one word")
    if len(ids) > context - 2:
        raise InputError(
            f"the text {shorten(text)} is too long: {len(ids)} tokens where {context - 2} fit; shorten it"
        )
    return ids


def shorten(value: object, limit: int = 80) -> str:
    """A value as quoted in messages: `repr`, its middle left out if it is long.

    >>> shorten("x" * 1000, 20)
    "'xxxxxxxx…xxxxxxxxx'"
    """
    quoted = repr(value)
    if len(quoted) <= limit:
        return quoted
    half = (limit - 1) // 2
    return f"{quoted[:half]}…{quoted[-(limit - 1 - half) :]}"
