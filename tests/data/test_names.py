"""Class names as a person reads them, and templates."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dear.data.names import check_classes, check_template, natural_key, readable, underscores_to_spaces
from dear.errors import DataError, InputError
from dear.utils.text import fill_template


@pytest.mark.parametrize(
    ("raw", "reading"),
    [
        ("golden_retriever", "golden retriever"),
        ("Golden_Retriever", "Golden Retriever"),
        ("golden  retriever ", "golden retriever"),
        ("__golden__", "golden"),
        ("n01440764", "n01440764"),
        ("SeaLake", "Sea Lake"),
        ("HerbaceousVegetation", "Herbaceous Vegetation"),
        ("ApplyEyeMakeup", "Apply Eye Makeup"),
        ("McDonald", "McDonald"),
        ("iPhone", "iPhone"),
        ("YMCA", "YMCA"),
        ("Forest", "Forest"),
        ("001.Black_footed_Albatross", "Black footed Albatross"),
        ("200.Common_Yellowthroat", "Common Yellowthroat"),
        ("1.5", "1.5"),
        ("2.", "2."),
        ("0", "0"),
        ("737-800", "737-800"),
        ("jack-o'-lantern", "jack-o'-lantern"),
        ("cafe\u0301", "café"),
        ("三毛猫", "三毛猫"),
        ("c++", "c++"),
    ],
)
def test_natural_readings(raw, reading):
    assert readable(raw) == reading


@pytest.mark.parametrize(
    "raw", ["", " ", "_", "___", "a\nb", "a\x00", "\x1b[31m", "a\u202eb", "a\u2028b", "x" * 201]
)
def test_names_that_cannot_be_read_are_refused(raw):
    with pytest.raises(InputError) as caught:
        readable(raw)
    assert len(str(caught.value)) < 300


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=300)
@given(names)
def test_a_reading_is_clean_and_final(raw):
    try:
        reading = readable(raw)
    except InputError:
        return
    assert reading == reading.strip() != ""
    assert "_" not in reading
    assert "  " not in reading
    assert "\n" not in fill_template("a photo of a {}.", reading)
    assert underscores_to_spaces(reading) == reading


@settings(max_examples=200)
@given(st.lists(st.text(string.ascii_letters + string.digits + "_ ", min_size=1, max_size=8), max_size=12))
def test_order_is_total_and_does_not_depend_on_the_start(raw):
    backwards = raw[::-1]
    assert sorted(raw, key=natural_key) == sorted(backwards, key=natural_key)
    folded = sorted({name.casefold() for name in raw}, key=natural_key)
    assert list(dict.fromkeys(name.casefold() for name in sorted(raw, key=natural_key))) == folded


def test_natural_order():
    assert sorted(["c10", "C2", "c1", "b", "c02", "10", "9", "é", "f", "z"], key=natural_key) == [
        "9",
        "10",
        "b",
        "c1",
        "C2",
        "c02",
        "c10",
        "é",
        "f",
        "z",
    ]
    assert sorted(["a" + "9" * 199, "a1"], key=natural_key)[0] == "a1"
    assert sorted(["e\u0301b", "éa"], key=natural_key) == ["éa", "e\u0301b"]  # however a disk spells accents


@pytest.mark.parametrize(
    "template", ["a photo", "{} and {}", "a {name}", "{0}", "{{}}", "a {} }", "{", "{}\n", "{ }"]
)
def test_templates_that_are_refused(template):
    with pytest.raises(InputError, match="template"):
        check_template(template)


def test_a_name_with_braces_is_only_a_name():
    assert fill_template("a {}.", "{}") == "a {}."
    assert fill_template("a {}.", "{0}\\1") == "a {0}\\1."


@pytest.mark.parametrize(
    "pair",
    [
        ("Cat", "cat"),
        ("Golden_Retriever", "golden retriever"),
        ("SeaLake", "sea_lake"),
        ("Ａ", "a"),
        ("straße", "STRASSE"),
    ],
)
def test_classes_that_read_the_same_are_refused(pair):
    with pytest.raises(DataError) as caught:
        check_classes(pair, [readable(name) for name in pair], "here")
    assert all(repr(name) in str(caught.value) for name in pair)
