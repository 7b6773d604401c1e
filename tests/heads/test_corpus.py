"""The corpus: size, balance, tags, wording, and users' own files."""

import itertools

import pytest

from dear.errors import InputError
from dear.heads.corpus import load_corpus
from dear.heads.corpus.build import phrases_of
from dear.heads.names import CONCEPTS


def test_general_corpus_covers_the_concepts():
    corpus = load_corpus()
    counts = corpus.counts()
    assert 3400 <= len(corpus) <= 3800
    assert set(CONCEPTS) < set(counts)
    assert min(counts.values()) >= 50
    assert max(counts.values()) < 0.2 * len(corpus)
    assert len({text.lower() for text in corpus.texts}) == len(corpus)
    assert all(text == text.strip() and "{" not in text and "  " not in text for text in corpus.texts)
    assert len(corpus.tags) == len(corpus)
    assert load_corpus() == corpus


def test_wordings_take_turns():
    text = "Fruit\n[all] 2\n- {}\n- {a}\n- an image of {a}\n- the {}\n: apple, pear, orange"
    assert [phrase.text for phrase in phrases_of(text)] == [
        "apple", "an image of an apple", "a pear", "the pear", "an image of an orange", "orange",
    ]  # fmt: skip
    assert {(phrase.concept, phrase.topic) for phrase in phrases_of(text)} == {("Fruit", "all")}


def test_articles_read_well():
    for text in load_corpus().texts:
        words = text.lower().split()
        for first, second in itertools.pairwise(words):
            if first == "an":
                assert second[0] in "aeioux" or second in ("hourglass", "s-shaped"), text
            if first == "a" and second not in ("and", "at"):
                assert second[0] not in "aeio", text


def test_users_files(tmp_path):
    plain = tmp_path / "mine.txt"
    plain.write_text("a cat\tAnimal\n\na dog\na cat\n  a größer Hund \t \n", encoding="utf-8")
    corpus = load_corpus(plain)
    assert corpus.name == "mine"
    assert corpus.texts == ("a cat", "a dog", "a größer Hund")
    assert corpus.tags == {"a cat": "Animal"}
    lines = tmp_path / "mine.jsonl"
    lines.write_text('{"phrase": "a cat", "concept": "Animal"}\n{"phrase": "a dog"}\n')
    assert load_corpus(str(lines)).tags == {"a cat": "Animal"}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("c.txt", "", "got 0"),
        ("c.txt", "x" * 500, "line 1"),
        ("c.csv", "x", "general"),
        ("c.jsonl", '{"phrase": "a"}\n{"phrase": 3}', "line 2"),
        ("c.jsonl", "[1]", "line 1"),
        ("c.jsonl", '{"phrase": "a", "other": 1}', "line 1"),
        ("c.jsonl", '{"phrase": "a", "concept": 1}', "concept"),
        ("c.jsonl", "{", "line 1"),
        ("c.txt", b"\xff\xfe", r"c\.txt"),
    ],
)
def test_bad_files_name_the_line(tmp_path, name, content, says):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=says):
        load_corpus(file)


def test_missing_corpus():
    with pytest.raises(InputError, match=r"none\.txt"):
        load_corpus("none.txt")
    with pytest.raises(InputError, match="'general', 'world'"):
        load_corpus("nonsense")


def test_world_corpus_speaks_the_captions_words():
    from dear.world.captions import _wording

    known = {word for phrase in _wording().words for word in phrase.split()}
    corpus = load_corpus("world")
    assert set(corpus.counts()) == set(CONCEPTS)
    assert 700 <= len(corpus) <= 1500
    assert {word for text in corpus.texts for word in text.split()} <= known
    assert corpus.tags["a happy expression"] == "Emotion"
    assert corpus.tags["two things"] == "Number"
