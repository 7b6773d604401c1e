"""Our tokens are CLIP's: a table made from the published merges by other code, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dear.clip.tokenizer import BOT, EOT, tokenize
from dear.errors import InputError

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
    with pytest.raises(InputError, match=r"'cat cat cat .*76 .*75"):
        tokenize(["a dog", "cat " * 76])


@pytest.mark.parametrize("text", ["", "   ", "\n\t", "&nbsp;", "\x00", "\ufeff", "&#28;", "\u0345"])
def test_empty_texts_are_refused(text):
    with pytest.raises(InputError, match="empty"):
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
    with pytest.raises(InputError, match=r"special token <\|(start|end)oftext\|>") as caught:
        tokenize(text)
    assert repr(text) in str(caught.value)


def test_a_huge_text_is_refused_in_a_short_message():
    with pytest.raises(InputError, match="5,000,000 characters") as caught:
        tokenize("word " * 1_000_000)
    assert len(str(caught.value)) < 200


def test_what_is_no_text_is_refused():
    with pytest.raises(InputError, match="not a text"):
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
