"""Tables of images: what is read, what is refused and how it is named; properties over many tables."""

import csv
import io
import json
import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dear.cli import build_app
from dear.data import open_data
from dear.data.check import check_splits
from dear.data.paths import ConfinedPaths
from dear.data.table import open_table
from dear.errors import DataError


def table(folder, text, name="t.csv", newline="\n"):
    path = folder / name
    path.write_bytes(text.replace("\n", newline).encode("utf-8"))
    return path


PLAIN = "path,label,split\nx/1.png,golden_retriever,train\nx/2.png,tabby_cat,test\nx/10.png,tabby_cat,train\n"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_csv(tmp_path, newline, mark):
    path = table(tmp_path, mark + PLAIN, newline=newline)
    train = open_table(path, "train")
    assert train.classes == ("golden retriever", "tabby cat")
    assert train.paths == ("x/1.png", "x/10.png")
    assert train.labels.tolist() == [0, 1]
    assert train.name == "t"
    assert open_table(path, "test").paths == ("x/2.png",)
    assert len(open_table(path, "all")) == 3
    with pytest.raises(DataError, match="'val'"):
        open_table(path, "val")


def test_quotes_commas_spaces_and_other_columns(tmp_path):
    text = 'Path , LABEL,notes\n"a, b/1 2.png","Siamese, blue",x\n"c""d.png", tabby ,"line\nbreak"\n\n'
    data = open_table(table(tmp_path, text), "all")
    assert data.paths == ("a, b/1 2.png", 'c"d.png')
    assert data.classes == ("Siamese, blue", "tabby")


def test_jsonl(tmp_path):
    lines = [
        {"path": "a.png", "label": 1, "classname": "Sea or Lake", "split": "train", "domain": "s"},
        {
            "path": "b.png",
            "label": 0,
            "classname": "annual_crop",
            "split": "train",
            "domain": "t",
            "more": [1],
        },
    ]
    path = table(tmp_path, "\n".join(map(json.dumps, lines)) + "\n\n", "index.jsonl")
    data = open_data(path, "train")
    assert data.classes == ("annual crop", "Sea or Lake")
    assert data.labels.tolist() == [1, 0]
    assert data.domains == ("s", "t")
    assert data.name == tmp_path.name


def test_numbers_are_ordered_by_value_and_may_have_gaps(tmp_path):
    text = "path,label,classname\na,10,ten\nb,9,nine\nc,-1,minus\n"
    data = open_table(table(tmp_path, text), "all")
    assert data.classes == ("minus", "nine", "ten")
    assert data.labels.tolist() == [2, 1, 0]


def test_without_a_split_column_a_fifth_is_held_out(tmp_path):
    text = "path,label,domain\n" + "".join(
        f"{c}/{d}/{n}.png,{c},{d}\n" for c in "ab" for d in "xy" for n in range(5)
    )
    path = table(tmp_path, text)
    train, test = open_table(path, "train"), open_table(path, "test")
    assert (len(train), len(test)) == (16, 4)
    assert sorted(zip(test.labels.tolist(), test.domains, strict=True)) == [
        (0, "x"),
        (0, "y"),
        (1, "x"),
        (1, "y"),
    ]


def test_paths_may_start_from_another_root(paint):
    root = paint("images/a.png")
    path = table(root, "path,label\na.png,cat\n")
    data = open_data(path, "all", root=root / "images")
    assert data.image(0).size == (12, 8)


def test_data_check_counts_and_reads_unlabeled_images(paint, tmp_path):
    paint("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png", "new/1.png")
    (tmp_path / "new" / "2.png").write_bytes(b"")
    rows = "path,label\ncat/1.png,cat\ncat/2.png,cat\ndog/1.png,dog\ndog/2.png,dog\nnew/1.png,\nnew/2.png,\n"
    check = check_splits(str(table(tmp_path, rows)))
    assert check.to_dict()["unlabeled"] == 2
    assert "unlabeled: 2 images" in str(check)
    assert ["new/2.png" in reason for reason in check.unreadable] == [True]


def test_data_check_takes_the_root_of_a_table(paint, tmp_path):
    root = paint("images/a.png", "images/b.png")
    path = table(root, "path,label,split\na.png,cat,train\nb.png,cat,test\n")
    done = CliRunner().invoke(build_app(), ["data", "check", str(path), "--data-root", str(root / "images")])
    assert done.exit_code == 0, done.output
    assert "1 image of 1 class, " in done.output


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "path.*label"),
        ("path,class\na,b\n", "label"),
        ("path;label\na;b\n", "path.*label"),
        ("path,label\n", None),
        ("path,label,label\na,b,c\n", "label"),
        ("path,label\na.png,cat\nb.png\n", r"row 3: .*\b1\b.*\b2\b"),
        ("path,label\na.png,cat,dog\n", r"row 2: .*\b3\b"),
        ("path,label\na.png,\n", "label"),
        ("path,label\n ,cat\n", "row 2: path"),
        ('path,label\n"a.png,cat\n', "CSV"),
        ("path,label\na.png,cat\na.png,dog\n", r"row 3: 'a.png'.* row 2"),
        ("path,label\na.png,cat\n./x/../a.png,cat\n", r"row 2"),
        ("path,label\na.png,Cat\nb.png,cat\n", "'Cat'.*'cat'"),
        (
            "path,label\na.png,golden_retriever\nb.png,golden retriever\n",
            "'golden_retriever'.*'golden retriever'",
        ),
        ("path,label,classname\na,0,cat\nb,0,dog\n", "row 3: .*'0'.*'dog'.*'cat'"),
        ("path,label,classname\na,0,cat\nb,1,CAT\n", "'0'.*'1'.*'CAT'"),
        ("path,label\na,b\x07c\n", "U\\+0007"),
        (f"path,label\na,{'x' * 300}\n", "300"),
        (f"path,label\na,{'x' * 200_000}\n", "row 2: "),
    ],
)
def test_malformed_csv_is_named(tmp_path, text, match):
    path = table(tmp_path, text)
    with pytest.raises(DataError, match=match) as caught:
        open_table(path, "all")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[1]", "row 1: "),
        ('{"path": "a", "label": "b"}\n{oops}', "row 2: "),
        ('{"path": "a", "path": "b", "label": "c"}', "row 1: .*path"),
        ('{"path": "a", "label": 1.5}', "label .*1.5"),
        ('{"path": "a", "label": true}', "label .*True"),
        ('{"path": 3, "label": "a"}', "path .*3"),
        ('{"path": "a"}', "row 1: .*label"),
        ('{"path": "a", "label": null}', "label"),
        (
            '{"path": "a", "label": "b", "split": "train"}\n{"path": "c", "label": "b"}',
            "row 2: .*'split'",
        ),
        ("[" * 100_000, "row 1"),
    ],
)
def test_malformed_jsonl_is_named(tmp_path, text, match):
    with pytest.raises(DataError, match=match):
        open_table(table(tmp_path, text, "t.jsonl"), "all")


def test_files_that_are_no_tables(tmp_path):
    with pytest.raises(DataError, match=r"absent\.csv"):
        open_table(tmp_path / "absent.csv", "all")
    (tmp_path / "latin.csv").write_bytes("path,label\na,caf\xe9\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.csv.*UTF-8"):
        open_table(tmp_path / "latin.csv", "all")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError):
        open_table(tmp_path / "folder.csv", "all")


# --- paths that try to leave -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "../secret.png",
        "a/../../secret.png",
        "..",
        "..\\secret.png",
        "/etc/passwd",
        "\\\\server\\share\\a.png",
        "C:\\a.png",
        "c:a.png",
        ".",
        "a\0b",
    ],
)
def test_paths_out_of_the_folder_are_refused(tmp_path, path):
    with pytest.raises(DataError, match="row 2"):
        ConfinedPaths(tmp_path).check(path, "row 2")


def test_links_out_of_the_folder_are_refused(paint):
    outside = paint("outside/secret.png", "data/inner/a.png")
    data = outside / "data"
    (data / "out").symlink_to(outside / "outside")
    (data / "image.png").symlink_to(outside / "outside" / "secret.png")
    (data / "within.png").symlink_to(data / "inner" / "a.png")
    for path in ("out/secret.png", "image.png", "out/not/there.png"):
        with pytest.raises(DataError, match=f"row 2: .*{re.escape(path)}"):
            ConfinedPaths(data).check(path, "row 2")
    assert open_table(table(data, "path,label\nwithin.png,a\n"), "all").image(0).size == (12, 8)


def test_the_root_itself_may_be_a_link(paint):
    root = paint("real/a.png")
    table(root / "real", "path,label\na.png,cat\n")
    (root / "linked").symlink_to(root / "real")
    assert open_table(root / "linked" / "t.csv", "all").image(0).size == (12, 8)


parts = st.sampled_from(["a", "b c", "..", ".", "", "link", "...", "~", "C:", "\\", "..\\.."])


@settings(max_examples=300)
@given(st.lists(parts, max_size=6).map("/".join))
def test_whatever_is_accepted_stays_inside(path):
    with tempfile.TemporaryDirectory() as top:
        root = Path(top) / "root"
        (root / "a").mkdir(parents=True)
        (root / "link").symlink_to(top)
        try:
            plain = ConfinedPaths(root).check(path, "here")
        except DataError:
            return
        real = os.path.realpath(root / plain)
        assert real.startswith(os.path.realpath(root) + os.sep)
        assert not plain.startswith(("/", "../"))


# --- properties ----------------------------------------------------------------------------------------

words = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=12
)
cells = st.tuples(
    words.filter(lambda text: text.strip(" .\u3000") and not set("/\\:~\0") & set(text)),
    words,
    st.sampled_from(["train", "test"]),
)


@settings(max_examples=150)
@given(st.lists(cells, min_size=1, max_size=8), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_any_table_is_read_whole_or_refused(rows, as_json, newline):
    """What goes in comes out, image by image, or there is one error of our own."""
    with tempfile.TemporaryDirectory() as top:
        if as_json:
            path = Path(top) / "t.jsonl"
            path.write_text(
                newline.join(
                    json.dumps(dict(zip(("path", "label", "split"), row, strict=True))) for row in rows
                ),
                newline="",
            )
        else:
            text = io.StringIO()
            writer = csv.writer(text, lineterminator=newline)
            writer.writerows([("path", "label", "split"), *rows])
            path = Path(top) / "t.csv"
            path.write_bytes(text.getvalue().encode())
        try:
            data = open_table(path, "all")
        except DataError:
            return
        assert len(data) == len(rows)
        assert len(set(data.classes)) == len({row[1].strip() for row in rows})
        assert data.labels.max() < len(data.classes)
        for (_, label, _), number in zip(rows, data.labels.tolist(), strict=True):
            same = [other.strip() == label.strip() for _, other, _ in rows]
            assert [bool(x) for x in (data.labels == number)] == same
        for split in {row[2] for row in rows}:
            assert len(open_table(path, split)) == sum(row[2] == split for row in rows)
