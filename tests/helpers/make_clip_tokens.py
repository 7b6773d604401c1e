"""Computes the ids of clip_tokens.json again, by CLIP's published vocabulary rules.

    python tests/helpers/make_clip_tokens.py bpe_simple_vocab_16e6.txt.gz

The argument is the file of merges that OpenAI published with CLIP. Everything else (cleaning, word pattern,
merging) is written here from those rules in the plainest way, and shares no code with `dear`. The strings
are the ones in the table: to add some, add rows with an empty list of ids and run this.
"""

from __future__ import annotations

import gzip
import html
import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

TABLE = Path(__file__).parents[1] / "clip" / "clip_tokens.json"
PATTERN = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


def byte_letters() -> dict[int, str]:
    """CLIP's letter for each byte: printable bytes stand for themselves, the rest for U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(rest)}


def encoder(merges_file: str) -> Callable[[str], list[int]]:
    """A function from text to ids, made from the published merges alone."""
    import ftfy
    import regex

    letters = byte_letters()
    lines = gzip.decompress(Path(merges_file).read_bytes()).decode().split("\n")
    merges = [tuple(line.split()) for line in lines[1 : 49152 - 256 - 2 + 1]]
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    units = [*letters.values(), *(letter + "</w>" for letter in letters.values())]
    ids = {unit: number for number, unit in enumerate(units + ["".join(pair) for pair in merges])}
    words = regex.compile(PATTERN, regex.IGNORECASE)

    def encode(text: str) -> list[int]:
        text = html.unescape(html.unescape(ftfy.fix_text(text))).strip()
        text = regex.sub(r"\s+", " ", text).strip().lower()
        result = []
        for word in words.findall(text):
            parts = [letters[byte] for byte in word.encode("utf-8")]
            parts[-1] += "</w>"
            # The merge of lowest rank, everywhere from left to right, until none is left.
            while len(parts) > 1:
                best = min(pairwise(parts), key=lambda pair: ranks.get(pair, len(ranks)))
                if best not in ranks:
                    break
                merged: list[str] = []
                for part in parts:
                    if merged and (merged[-1], part) == best:
                        merged[-1] += part
                    else:
                        merged.append(part)
                parts = merged
            result += [ids[part] for part in parts]
        return result

    return encode


def main() -> None:
    """Write the table again."""
    encode = encoder(sys.argv[1])
    rows = [json.dumps([text, encode(text)]) for text, _ in json.loads(TABLE.read_text(encoding="ascii"))]
    TABLE.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="ascii")


if __name__ == "__main__":
    main()
