"""Our tokens are CLIP's: a table made from the published merges by other code, and what is refused."""

import gzip
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_clip_tokens import encoder

from dear.clip.tokenizer import BOT, EOT, clean, tokenize
from dear.errors import InputError
from dear.utils import byte_pairs

TABLE = json.loads(Path(__file__).with_name("clip_tokens.json").read_text(encoding="ascii"))


def test_hundreds_of_strings_have_the_published_ids_between_bot_and_eot():
    assert len(TABLE) > 500
    texts = [text for text, _ in TABLE]
    rows = tokenize(texts)
    assert rows.shape == (len(TABLE), 77)
    assert rows.dtype == torch.int64
    for row, (_, ids) in zip(rows.tolist(), TABLE, strict=True):
        assert row == [BOT, *ids, EOT] + [0] * (75 - len(ids))


def test_one_text_is_a_list_of_one():
    assert torch.equal(tokenize("a cat"), tokenize(["a cat"]))
    assert tokenize([]).shape == (0, 77)


def test_a_text_may_fill_the_context_exactly():
    assert tokenize(["cat " * 75])[0, -1] == EOT
    assert tokenize(["cat " * 3], context=5).tolist() == [[BOT, 2368, 2368, 2368, EOT]]
    with pytest.raises(InputError, match=r"75.*76.*'cat cat cat"):
        tokenize(["a dog", "cat " * 76])


@pytest.mark.parametrize("text", ["", "   ", "\n\t", "&nbsp;", "\x00", "\ufeff", "&#28;", "\u0345"])
def test_empty_texts_are_refused(text):
    with pytest.raises(InputError, match=re.escape(repr(text))):
        tokenize(["a cat", text])


@pytest.mark.parametrize(
    "text",
    [
        "a <|endoftext|> b",
        "<|STARTOFTEXT|>",
        "&lt;|endoftext|&gt;",
        "&amp;lt;|endoftext|&amp;gt;",
        "x<|EndOfText|>",
    ],
)
def test_special_tokens_are_refused_and_quoted(text):
    with pytest.raises(InputError, match=r"<\|(start|end)oftext\|>") as caught:
        tokenize(text)
    assert repr(text) in str(caught.value)


def test_a_huge_text_is_refused_in_a_short_message():
    with pytest.raises(InputError, match="5,000,000") as caught:
        tokenize("word " * 1_000_000)
    assert len(str(caught.value)) < 200


def test_what_is_no_text_is_refused():
    with pytest.raises(InputError, match="None"):
        tokenize(["a cat", None])  # type: ignore[list-item]


@settings(max_examples=200)
@given(st.text(max_size=40))
def test_any_text_is_tokens_or_a_refusal(text):
    """Whatever comes in, the markers stand only at the ends."""
    try:
        row = tokenize(text)[0].tolist()
    except InputError:
        return
    end = row.index(EOT)
    assert row[0] == BOT
    assert all(0 <= token < BOT for token in row[1:end])
    assert set(row[end + 1 :]) <= {0}


published = encoder(str(byte_pairs._MERGES))


def assigned() -> st.SearchStrategy[str]:
    """Characters that were letters, digits or signs in Unicode 14 already."""
    return st.characters(exclude_categories=("Cn", "Cs", "Co"), max_codepoint=0x2FFFF)


@settings(max_examples=300, deadline=None)
@given(st.text(assigned(), max_size=30) | st.text("abcſ'SsTt \u03452é\u00a0<|>_", max_size=30))
def test_any_text_has_the_ids_of_the_published_rules(text):
    cleaned = clean(text)
    assert byte_pairs.encode(cleaned) == published(cleaned)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(max_codepoint=0x7F), max_size=30))
def test_any_ascii_text_has_the_ids_of_transformers(text):
    cleaned = clean(text)
    assert byte_pairs.encode(cleaned) == transformers_clip().encode(cleaned, add_special_tokens=False)


@cache
def transformers_clip():
    transformers = pytest.importorskip("transformers")
    tokenizer = byte_pairs._tokenizer()
    lines = gzip.decompress(byte_pairs._MERGES.read_bytes()).decode().splitlines()[1:]
    vocab = tokenizer.get_vocab() | {"<|startoftext|>": BOT, "<|endoftext|>": EOT}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[tuple(line.split()) for line in lines])
