"""Readers of text: JSON, role maps, tables, splits, draws, corpora, class names, cells."""

from __future__ import annotations

import json
import os
from pathlib import Path

import mutate
import torch
from fuzzing import Target

from dear.clip.tokenizer import tokenize
from dear.data.images import FileImages
from dear.data.names import check_template, readable
from dear.data.open import BENCHMARKS, open_benchmark
from dear.data.shots import read_draw
from dear.data.table import open_table
from dear.heads.corpus import load_corpus
from dear.heads.roles import RoleMap
from dear.tasks.roles.page import roles_page
from dear.utils.files import read_json
from dear.utils.schema import parse_json
from dear.utils.text import fill_template, first_unprintable

MARKUP = "<script>alert("
NASTY = (
    b"../",
    b"/etc/passwd",
    b"..\\",
    b"\x00",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b'"',
    b"\r",
    b"<b>",
    b"{}",
)


def json_file(folder: Path) -> Target:
    path = folder / "a.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        value = read_json(path)
        again = parse_json(json.dumps(value, allow_nan=False, ensure_ascii=False), "again")
        assert json.dumps(again) == json.dumps(value)
        json.dumps(value, ensure_ascii=False).encode("utf-8")

    seeds = [b'{"a": [1, 2.5, null, true, "x"], "b": {"c": []}}', b"[]", b'"text"', b"1e3"]
    return Target("json", seeds, read, mutate.json_text, [w.encode() for w in mutate.LITERALS])


def role_map(folder: Path) -> Target:
    path, again = folder / "roles.json", folder / "again.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        roles = RoleMap.load(path)
        roles.save(again)
        assert dict(RoleMap.load(again).table) == dict(roles.table)
        page = roles_page(roles)
        assert MARKUP not in page
        assert "<b>" not in page.split("<main>")[1].split("</main>")[0].replace("<b>core", "")

    table2 = RoleMap.table2()
    table2.save(path)
    small = RoleMap.uniform("mixed", (3, 4), 2)
    small.save(again)
    document = json.loads(again.read_text())
    found = {"way": "clusters", "phrases": 2, "clusters": 1, "noise": 0.5, "agreement": {"purity": 0.5}}
    document["evidence"] = {
        "concept_of": {"a red thing": "Color"},
        "image_count": 5,
        "image_source": "photos",
        "explained": {"3": [0.5, 0.5]},
        "corpus": {"name": "general", "phrases": 3},
        "concepts": {**found, "concepts": {"Color": {"phrases": 2, "clusters": 1}}},
    }
    document["roles"][0] |= {"phrases": ["a red thing", "<b>"], "shares": {"Color": 1.0}, "entropy": 0.0}
    seeds = [again.read_bytes(), json.dumps(document).encode(), path.read_bytes()]
    return Target("role-map", seeds[:2], read, mutate.json_text)


def _check_set(images: FileImages, root: Path | None = None) -> None:
    """What must hold of a dataset that was opened; its files are inside `root`, if there is one."""
    assert len(images) == len(images.labels) == len(images.paths)
    assert all(first_unprintable(name) is None and name.strip() for name in images.classes)
    for index, path in enumerate(images.paths if root is not None else ()):
        assert not path.startswith("/")
        assert os.path.realpath(images.path(index)).startswith(os.path.realpath(root) + os.sep), path
    if len(images):
        assert 0 <= int(images.labels.min()) <= int(images.labels.max()) < len(images.classes)
    torch.arange(len(images.classes))[images.labels]


def _csv(folder: Path) -> Target:
    root = folder / "table"
    root.mkdir(exist_ok=True)
    path = root / "a.csv"
    _link(root / "out", folder)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        _check_set(open_table(path, "all"))

    seeds = [
        b"path,label,split,domain\na/1.jpg,cat,train,x\na/2.jpg,dog,test,y\n",
        b'path,label,classname\n1.jpg,0,"tabby, cat"\n2.jpg,1,fox\n',
    ]
    return Target("table-csv", seeds, read, words=[*NASTY, b"out/x.jpg", b"\npath,label\n", b",,,"])


def _jsonl(folder: Path) -> Target:
    root = folder / "lines"
    root.mkdir(exist_ok=True)
    path = root / "a.jsonl"
    _link(root / "out", folder)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        _check_set(open_table(path, "all"))

    seeds = [b'{"path": "1.jpg", "label": "cat"}\n{"path": "2.jpg", "label": "dog"}\n']
    seeds += [b'{"path": "1.jpg", "label": 3, "classname": "fox", "split": "train", "domain": "a"}']
    return Target(
        "table-jsonl", seeds, read, mutate.json_text, [*NASTY, b'{"path": "out/x.jpg", "label": 1}']
    )


def _link(place: Path, target: Path) -> None:
    if not place.is_symlink():
        place.symlink_to(target)


def split_file(folder: Path) -> Target:
    benchmark = BENCHMARKS["EuroSAT"]
    home = folder / "root" / benchmark.folder
    (home / benchmark.images).mkdir(parents=True, exist_ok=True)
    _link(home / benchmark.images / "out", folder)

    def read(data: bytes) -> None:
        (home / benchmark.split).write_bytes(data)
        _check_set(open_benchmark("EuroSAT", "all", folder / "root"), home / benchmark.images)

    rows = {
        "train": [["a/1.jpg", 0, "Forest"], ["b/1.jpg", 1, "Sea_Lake"]],
        "val": [],
        "test": [["a/2.jpg", 0, "Forest"]],
    }
    return Target("split-file", [json.dumps(rows).encode()], read, mutate.json_text, [*NASTY, b"out/x"])


def lists(folder: Path) -> Target:
    """FGVC Aircraft's lists: the variants and the images, in one input with a line between them."""
    benchmark = BENCHMARKS["FGVCAircraft"]
    home = folder / "air" / benchmark.folder
    (home / benchmark.images).mkdir(parents=True, exist_ok=True)
    _link(home / benchmark.images / "out", folder)

    def read(data: bytes) -> None:
        names, _, rows = data.partition(b"\n--\n")
        (home / "variants.txt").write_bytes(names)
        for split in ("train", "val", "test"):
            (home / f"images_variant_{split}.txt").write_bytes(rows)
        _check_set(open_benchmark("FGVCAircraft", "all", folder / "air"), home / benchmark.images)

    return Target(
        "name-lists", [b"707-320\nA300B4\n--\n001 707-320\n002 A300B4\n"], read, words=[*NASTY, b"out/x "]
    )


def draw(folder: Path) -> Target:
    path = folder / "draw.jsonl"
    paths = tuple(f"{name}/{n}.jpg" for name in ("cat", "dog") for n in range(4))
    images = FileImages("pets", ("cat", "dog"), "a {}", folder, paths, torch.tensor([0] * 4 + [1] * 4))

    def read(data: bytes) -> None:
        path.write_bytes(data)
        found = read_draw(path, images)
        assert len(set(found)) == len(found) > 0
        assert all(0 <= index < len(images) for index in found)

    seeds = [b'{"path": "cat/1.jpg", "label": 0, "class": "cat"}\n{"path": "dog/0.jpg"}\n']
    return Target("draw", seeds, read, mutate.json_text, NASTY)


def corpus(folder: Path) -> Target:
    def read(data: bytes) -> None:
        path = folder / ("a.jsonl" if data[:1] == b"{" else "a.txt")
        path.write_bytes(data)
        found = load_corpus(path)
        assert 0 < len(found) == len(set(found.texts))
        assert all(phrase.strip() and first_unprintable(phrase) is None for phrase in found.texts)

    seeds = [
        b"a red thing\tColor\na photo of a cat\n",
        b'{"phrase": "a red thing", "concept": "Color"}\n{"phrase": "x"}',
    ]
    return Target("corpus", seeds, read, mutate.json_text, NASTY)


def class_names(folder: Path) -> Target:
    def read(data: bytes) -> None:
        raw = data.decode("utf-8", "surrogateescape")
        name = readable(raw)
        assert name.strip()
        assert first_unprintable(name) is None
        assert len(name) <= 400
        text = fill_template(check_template("a photo of a {}."), name)
        assert text.startswith("a photo of a ")
        assert name in text
        ids = tokenize(text)[0].tolist()
        assert ids[0] == 49406
        assert ids.count(49406) == 1
        assert ids.count(49407) == 1
        assert max(ids) == 49407

    seeds = [
        b"golden_retriever",
        "001.Caf\u00e9 au lait".encode(),
        b"n01440764",
        b"SeaLake",
        "犬と猫".encode(),
    ]
    seeds += ["🐕 dog".encode()]
    words = [
        *NASTY,
        b"<|endoftext|>",
        b"<|startoftext|>",
        b"<end_of_text>",
        b"&lt;|endoftext|&gt;",
        b"\xe2\x80\xae",
    ]
    words += ["\u0345".encode(), "'\u017f".encode(), b"&#60;", b"_" * 50, b"a" * 300, "\ufdfa".encode() * 20]
    return Target("class-name", seeds, read, words=words)


def templates(folder: Path) -> Target:
    def read(data: bytes) -> None:
        template = check_template(data.decode("utf-8", "surrogateescape"))
        assert fill_template(template, "{}{0}") == template.replace("{}", "{}{0}")

    seeds = [b"a photo of a {}.", b"{}", "ein Foto: {} \u00e9".encode()]
    return Target("template", seeds, read, words=[*NASTY, b"{", b"}", b"{0}", b"{a.b}", b"%s"])


TARGETS = {
    "json": json_file,
    "role-map": role_map,
    "table-csv": _csv,
    "table-jsonl": _jsonl,
    "split-file": split_file,
    "name-lists": lists,
    "draw": draw,
    "corpus": corpus,
    "class-name": class_names,
    "template": templates,
}
