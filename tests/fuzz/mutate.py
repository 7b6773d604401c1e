"""Small and nasty changes of good inputs: of bytes, of JSON trees, and of safetensors headers."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

BYTES = (0, 1, 9, 10, 13, 27, 34, 44, 46, 47, 92, 0x7B, 0x7D, 0x7F, 0x80, 0xC3, 0xE2, 0xED, 0xFE, 0xFF)
NUMBERS = (0, 1, 2**7, 2**8, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
LITERALS = (
    *("null", "true", "false", "0", "-1", "1", "-0.0", "0.5", "1e308", "1e999", "-1e999", "NaN", "Infinity"),
    *("9" * 20, "9" * 400, "1e-400", '""', '"x"', '"\\u0000"', '"\\ud800"', '"\\u202e"', '"\\u001b[2J"'),
    *("[]", "{}", "[[]]", "[1,2,3]", '{"a":1}', '["a","a"]', "[" * 90 + "]" * 90, "[" * 2000 + "]" * 2000),
    *('"' + "x" * 5000 + '"', '"../../etc/passwd"', '"/etc/passwd"', '"<script>alert(1)</script>"'),
    *('"{}"', '"{0.__class__}"', '"%s%n"', '"<|endoftext|>"', '"C:\\\\x"', '"a/../../b"', "2147483648"),
)


class Raw(str):
    """A piece of JSON text that stands as it is: also what no JSON library would write."""


def dump(value: Any) -> str:
    """JSON text of a tree in which `Raw` pieces may stand; a list of pairs under `Pairs` may repeat keys."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(str(k))}:{dump(v)}" for k, v in value) + "}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(k))}:{dump(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)


class Pairs(list):
    """The pairs of an object, keys repeated or not."""


def bytes_of(data: bytes, rng: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """One to four changes anywhere in the bytes."""
    buffer = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(buffer) + 1)
        match rng.randrange(11):
            case 0 if buffer:
                buffer[at % len(buffer)] ^= 1 << rng.randrange(8)
            case 1 if buffer:
                buffer[at % len(buffer)] = rng.choice(BYTES)
            case 2:
                buffer[at:at] = bytes(rng.choice(BYTES) for _ in range(rng.choice((1, 2, 8))))
            case 3:
                del buffer[at : at + rng.choice((1, 2, 4, 16, 64))]
            case 4:
                del buffer[at:]
            case 5:
                start = rng.randrange(len(buffer) + 1)
                buffer[at:at] = buffer[start : start + rng.choice((4, 16, 64, 256))]
            case 6 if words:
                buffer[at:at] = rng.choice(words)
            case 7 if words:
                word = rng.choice(words)
                buffer[at : at + len(word)] = word
            case 8:
                width = rng.choice((1, 2, 4, 8))
                number = rng.choice(NUMBERS) % 256**width
                buffer[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
            case 9:
                other = rng.choice(pool)
                cut = rng.randrange(len(other) + 1)
                buffer[at:] = other[cut:]
            case _:
                other = rng.choice(pool)
                cut = rng.randrange(len(other) + 1)
                buffer[at:at] = other[cut : cut + rng.choice((4, 16, 64))]
    return bytes(buffer[:1_000_000])


def tree_of(value: Any, rng: random.Random) -> Any:
    """One to three changes of a JSON tree."""
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        value = _tree(value, rng)
    return value


def _tree(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict | list) and not isinstance(value, Pairs) and value and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = rng.choice(keys)
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        match rng.randrange(12):
            case 0:
                del copy[key]
            case 1 if isinstance(copy, list):
                copy.insert(key, copy[rng.randrange(len(copy))])
            case 1:
                return Pairs([*value.items(), (key, value[rng.choice(keys)])])
            case 2 if isinstance(copy, dict):
                copy[rng.choice(("", "x", "__class__", "\x1b[2J", "a" * 300, str(key) + "s"))] = value[key]
            case 3:
                copy[key] = value[rng.choice(keys)]
            case 4 if isinstance(copy, list):
                rng.shuffle(copy)
            case _:
                copy[key] = _tree(value[key], rng)
        return copy
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 1e300
        and rng.random() < 0.4
    ):
        return rng.choice((value + 1, value - 1, -value, value * 2, value * 1000, value * 0.3, str(value)))
    if isinstance(value, str) and value and not isinstance(value, Raw) and rng.random() < 0.4:
        at = rng.randrange(len(value))
        return (
            value[:at] + rng.choice(("", "\x00", "\x1b", "\u202e", "é", " ", "../", "<b>", "{}")) + value[at:]
        )
    return Raw(rng.choice(LITERALS))


def json_text(data: bytes, rng: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """A change of the tree where the bytes are JSON (or one line of them is), else of the bytes."""
    if rng.random() < 0.25:
        return bytes_of(data, rng, pool, words)
    try:
        return dump(tree_of(json.loads(data), rng)).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        pass
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    try:
        lines[at] = dump(tree_of(json.loads(lines[at]), rng)).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return bytes_of(data, rng, pool, words)
    return b"\n".join(lines)


def safetensors_file(data: bytes, rng: random.Random, pool: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """A change of the header's tree, its length kept right or not; or of the bytes."""
    if rng.random() < 0.3 or len(data) < 8:
        return bytes_of(data, rng, pool, words)
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8:end])
        changed = dump(tree_of(header, rng)).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return bytes_of(data, rng, pool, words)
    length = len(changed) if rng.random() < 0.9 else rng.choice(NUMBERS)
    body = bytearray(data[end:])
    if rng.random() < 0.3 and body:  # numbers that are none: NaN, infinity, the largest
        at = rng.randrange(len(body)) & ~3
        body[at : at + 4] = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\xff\xff\x7f\x7f"))
    return struct.pack("<Q", length) + changed + bytes(body)


Mutator = Callable[[bytes, random.Random, Sequence[bytes], Sequence[bytes]], bytes]
