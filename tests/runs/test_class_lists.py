"""Class lists mean the same in commands, files, requests, and the studio."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dear.errors import DearError, InputError, UsageError
from dear.runs.class_lists import (
    combine_classes,
    find_twins,
    format_class_list,
    resolve_classes,
    split_class_lines,
    split_class_list,
)
from dear.serve.errors import Refused
from dear.serve.requests import options_of_fields, read_classes
from dear.serve.schemas import ClassifyOptions
from dear.studio.classify import parse_classes

TRAINED = ("brick", "dotted", "grid")
WORDS = st.lists(
    st.from_regex(r"[a-z]{4,8}( [a-z]{1,8})?", fullmatch=True), min_size=1, max_size=6, unique=True
)
# Printable text without line breaks or spaces at the ends.
NAMES = st.lists(
    st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=12)
    .map(str.strip)
    .filter(lambda name: name not in ("", "+")),
    min_size=1,
    max_size=5,
)
SPACES = st.sampled_from(["", " ", "  ", "\t"])


@pytest.mark.parametrize("text", ["+wolf, red fox", "wolf, +red fox", "wolf,+ red fox", "+wolf,\n+red fox,,"])
def test_a_plus_sign_before_any_name_adds_all_names(text: str) -> None:
    assert resolve_classes(split_class_list(text), TRAINED) == (*TRAINED, "wolf", "red fox")


def test_a_trained_name_is_kept_once() -> None:
    assert resolve_classes(["+brick", "wolf"], TRAINED) == (*TRAINED, "wolf")
    assert resolve_classes(["+brick"], TRAINED) == TRAINED
    assert resolve_classes(["brick", "wolf"], TRAINED) == ("brick", "wolf")


@pytest.mark.parametrize("names", [["+Brick"], ["Brick", "wolf"], ["+wolf", "Wolf"], ["a  b", "a b"]])
def test_names_that_clip_cannot_distinguish_are_refused(names: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_classes(names, TRAINED)
    assert repr(names[-1].removeprefix("+")) in str(caught.value) or repr(names[0]) in str(caught.value)


@pytest.mark.parametrize("names", [["wolf", "wolf"], ["+wolf", "wolf"], ["+brick", "+brick"]])
def test_a_name_that_is_listed_twice_is_refused(names: list[str]) -> None:
    with pytest.raises(UsageError, match=f"'{names[-1].removeprefix('+')}'"):
        resolve_classes(names, TRAINED)


def test_nothing_blank_is_a_class() -> None:
    with pytest.raises(UsageError, match=re.escape("+")):
        split_class_list("wolf, +")
    with pytest.raises(UsageError):
        resolve_classes([], TRAINED)
    with pytest.raises(InputError, match="''"):
        resolve_classes(["wolf", " "], TRAINED)


def test_lists_in_files_have_one_name_per_line() -> None:
    assert split_class_lines('\ufeff+honeycomb\r\n\r\n scaly \r\nfox, red\r\n+"a, b"') == [
        "+honeycomb", "scaly", "fox, red", "+a, b",
    ]  # fmt: skip


def test_a_class_that_was_trained_with_a_plus_sign_is_that_class() -> None:
    assert resolve_classes(["+1", "wolf"], ["+1", "-1"]) == ("+1", "wolf")
    assert resolve_classes(["++2"], ["+1", "-1"]) == ("+1", "-1", "+2")


def test_twins_are_compared_by_value() -> None:
    name = "texture"
    assert find_twins([name, "grid", name]) == (name, name)
    assert find_twins(["grid", "Texture", "texture "]) == ("Texture", "texture ")
    assert find_twins(["grid", "texture"]) is None


@given(NAMES)
def test_a_formatted_list_is_read_as_the_same_names(names: list[str]) -> None:
    assert split_class_list(format_class_list(names)) == names
    lines = format_class_list(names, "\r\n")
    assert split_class_list(lines) == split_class_lines(lines) == split_class_lines("\ufeff" + lines) == names


@given(WORDS, st.data())
def test_order_space_and_place_of_the_plus_sign_change_nothing_else(
    words: list[str], data: st.DataObject
) -> None:
    marks = data.draw(st.lists(st.booleans(), min_size=len(words), max_size=len(words)))
    order = data.draw(st.permutations(range(len(words))))
    spaces = data.draw(st.lists(SPACES, min_size=3 * len(words), max_size=3 * len(words)))

    def text(places: list[int]) -> str:
        return ",".join(
            f"{spaces[3 * i]}{'+' * marks[i]}{spaces[3 * i + 1]}{words[i]}{spaces[3 * i + 2]}" for i in places
        )

    plain = resolve_classes(split_class_list(text(list(range(len(words))))), TRAINED)
    permuted = resolve_classes(split_class_list(text(order)), TRAINED)
    assert set(plain) == set(permuted)
    if any(marks):
        assert plain == (*TRAINED, *(word for word in words if word not in TRAINED))
        assert permuted[: len(TRAINED)] == TRAINED
    else:
        assert plain == tuple(words)
        assert permuted == tuple(words[i] for i in order)


@given(
    st.lists(st.sampled_from(["brick", "+brick", "Brick", "wolf", "+wolf", "a  b", "a b", '"x, y"', "", "+"]))
)
def test_every_surface_gives_the_same_answer(items: list[str]) -> None:
    text = ", ".join(items)

    def answer(resolve) -> object:
        try:
            return resolve()
        except (DearError, Refused):
            return None

    def service() -> object:
        return read_classes(options_of_fields({"classes": [text]}, ClassifyOptions).classes, TRAINED)

    expected = answer(lambda: resolve_classes(split_class_list(text), TRAINED))
    assert answer(service) == expected
    studio = answer(lambda: parse_classes(text, TRAINED))
    assert studio == (expected if expected is None or len(expected) > 1 else None)


def test_combining_does_not_read_plus_signs() -> None:
    assert combine_classes(["+wolf"], TRAINED, add=True) == (*TRAINED, "+wolf")
