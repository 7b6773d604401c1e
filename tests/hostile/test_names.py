"""Class names of strangers: in prompts, in the terminal, and escaped on every page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from made_cells import make_cell
from PIL import Image
from tiny import Colors, mixed_roles, tiny_clip

from dear.bench.cells import Outcome
from dear.bench.outputs import figures_of, write_protocol
from dear.bench.store import Grid, read_cell
from dear.clip.tokenizer import tokenize
from dear.data import open_data
from dear.data.names import readable
from dear.data.open import BENCHMARKS, open_benchmark
from dear.errors import DataError, DearError, InputError, UsageError
from dear.heads.role import Role
from dear.heads.roles import RoleMap
from dear.methods import METHODS, DeAR, build_method
from dear.report.page import Thumbnail
from dear.studio.classify import Verdict, verdicts_html
from dear.studio.heads import HeadView, describe_html, map_html
from dear.studio.training import TrainingResult, TrainingStatus, status_html
from dear.tasks.evaluate import HeldOutAccuracy
from dear.tasks.roles.evidence import measure_heads
from dear.tasks.roles.page import roles_page
from dear.tasks.run_report.examine import examine
from dear.tasks.run_report.page import run_page
from dear.utils.text import fill_template

MARKUP = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><script>alert(1)</script>",
    "<a href='javascript:alert(1)'>cat</a>",
    "<b>bold</b>&amp;",
    "{{7*7}}{0.__class__}%s",
    "'; drop table; --",
]
CONTROL = ["a\x00b", "a\x1b[2Jb", "a\nb", "a\rb", "a\x7fb", "a\x9bb", "a\u2028b", "a\u202eb", "a\ud800b"]


class Elements(HTMLParser):
    """What a browser would make of a page: its elements and their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.harm: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            target = (value or "").strip() if name in ("src", "href", "action", "formaction") else "data:"
            if name.startswith("on") or not target.startswith(("data:", "#")):
                self.harm.append(f"{tag} {name}={value}")


def harmless(page: str, *allowed: str) -> None:
    """No element comes out of a name, and nothing is run or loaded but the page's own program."""
    found = Elements(page)
    assert not found.harm, found.harm
    assert not {"b", "a", "iframe", "object", "embed"} & set(found.tags) - set(allowed), set(found.tags)
    for script in re.findall(r"<script[^>]*>(.*?)</script>", page, re.S):
        assert "<script>alert" not in script
        assert not re.search(r"<a href='javascript|<b>bold|<img src=x", script)
        if "Plotly.newPlot(" in script and "plotly.js v" not in script:
            unmarked(script.replace("\\u003c", "<").replace("\\u003e", ">"))


def unmarked(figure: str) -> None:
    """Plotly reads some HTML in the texts of a figure: a name must not be any."""
    assert not re.search(r"<a href=|<b>bold|<img |<script>alert", figure)


# --- prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONTROL)
def test_control_characters_are_refused_wherever_names_enter(name: str, tmp_path: Path) -> None:
    clip = tiny_clip(dtype=torch.float32)
    with pytest.raises(InputError, match=r"U\+[0-9A-F]{4}"):
        readable(name)
    with pytest.raises(InputError, match=r"U\+[0-9A-F]{4}"):
        build_method("zeroshot", clip, ["cat", name])
    rows = [{"path": "1.jpg", "label": "cat"}, {"path": "2.jpg", "label": name}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError):
        open_data(tmp_path / "t.jsonl", "all")
    benchmark = BENCHMARKS["EuroSAT"]
    home = tmp_path / benchmark.folder
    (home / benchmark.images).mkdir(parents=True)
    (home / benchmark.split).write_text(json.dumps({"train": [["1.jpg", 0, "cat"], ["2.jpg", 1, name]]}))
    if name.split() == [name]:  # of line ends in a published name a space is made
        with pytest.raises(DataError):
            open_benchmark("EuroSAT", "train", tmp_path)


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|startoftext|>", "<|EndOfText|>", "&lt;|endoftext|&gt;"])
def test_clips_special_tokens_are_refused(name: str) -> None:
    clip = tiny_clip(dtype=torch.float32)
    with pytest.raises(InputError, match=re.escape(f"a {name} b")):
        build_method("dear", clip, ["cat", f"a {name} b"], roles=mixed_roles())


def test_the_markers_of_the_tokenizer_library_are_plain_words() -> None:
    for name in ("<start_of_text>", "<end_of_text>"):
        row = tokenize(f"a photo of a {name}.")[0].tolist()
        assert row.count(49406) == row.count(49407) == 1


@pytest.mark.parametrize("name", ["{}", "{0}", "{name}", "{0.__class__}", "%s", "{", "}", "\\1", "$x"])
def test_braces_mean_nothing_in_a_name(name: str) -> None:
    assert fill_template("a photo of a {}.", name) == f"a photo of a {name}."
    for kind in METHODS:
        build_method(kind, tiny_clip(dtype=torch.float32), ["cat", name], roles=mixed_roles())


@pytest.mark.parametrize("name", ["x" * 10_000, "word " * 2_000, "ﷺ" * 150, "🐕" * 190])
def test_names_of_ten_thousand_characters_are_refused(name: str) -> None:
    clip = tiny_clip(dtype=torch.float32)
    with pytest.raises(InputError) as refused:
        build_method("zeroshot", clip, ["cat", name])
    assert len(str(refused.value)) < 500
    with pytest.raises((InputError, UsageError)):
        build_method("zeroshot", clip, ["cat", "dog"], template="{} " + name)


def test_folders_of_odd_names_are_read_or_refused(tmp_path: Path) -> None:
    for name in ("cat", "a{b}c", "50% off", "ünï cödé", "'quoted'", "<b>bold", "<|endoftext|>", "-rf", "$x"):
        (tmp_path / "good" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "good" / name / "a.png")
    assert "<b>bold" in open_data(tmp_path / "good", "all").classes
    (tmp_path / "good" / "a\x1b[2Jb").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "good" / "a\x1b[2Jb" / "a.png")
    with pytest.raises(DataError, match=r"U\+001B"):
        open_data(tmp_path / "good", "all")


# --- the terminal ------------------------------------------------------------------------------------------


def test_errors_do_not_command_the_terminal(tmp_path: Path) -> None:
    name = "a\x1b]0;owned\x07\x1b[2J.csv"
    (tmp_path / name).write_bytes(b"\xff\xfe")
    code = "from dear.cli import main; main()"
    words = ["zeroshot", "--data", str(tmp_path / name)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "\x1b" not in done.stderr
    assert "\x07" not in done.stderr
    assert "\\x1b" in done.stderr


def test_markup_of_the_terminal_means_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from dear.cli import build_app

    table = {(3, 0): Role("core", "[red]Color[/]", 0.0, {"[red]Color[/]": 1.0}, ("[/nonsense] a", "[bold]b"))}
    RoleMap(table, 1, backbone="[/x][link=http://evil]mini", core=("[red]Color[/]",)).save(
        tmp_path / "r.json"
    )
    shown = CliRunner().invoke(
        build_app(), ["roles", "show", str(tmp_path / "r.json")], env={"COLUMNS": "200"}
    )
    assert shown.exit_code == 0, shown.output
    assert "[/x][link=http://evil]mini" in shown.output.replace("\n", "")
    assert "[/nonsense] a" in shown.output


# --- pages -------------------------------------------------------------------------------------------------


def hostile_roles() -> RoleMap:
    """Markup in every text of a role map."""
    one, two = MARKUP[0], MARKUP[1]
    roles = {(3, n): Role("core", one, 0.5, {one: 0.5, two: 0.5}, tuple(MARKUP)) for n in range(2)}
    evidence = {
        "concept_of": dict.fromkeys(MARKUP, one),
        "image_source": two,
        "image_count": 3,
        "corpus": {"name": one, "phrases": 3},
        "concepts": {"way": one, "agreement": {two: 0.5}, "concepts": {one: {"phrases": 1, "clusters": 1}}},
    }
    parameters = {one: two}
    return RoleMap(roles, 2, one, None, None, two, parameters, (one,), evidence)


def test_the_roles_page(tmp_path: Path) -> None:
    hostile_roles().save(tmp_path / "roles.json")
    page = roles_page(RoleMap.load(tmp_path / "roles.json"))
    harmless(page)
    assert page.count("<script") == 2  # its data and its program
    assert "&lt;script&gt;alert(1)" in page
    assert "Content-Security-Policy" in page


def test_the_report_of_a_run() -> None:
    clip = tiny_clip(dtype=torch.float32)
    images = Colors()
    images.classes = tuple(MARKUP[:3])
    model = DeAR(clip, MARKUP[:3], roles=mixed_roles())
    log = [{"step": 1, "loss": 2.0, MARKUP[1]: 1.0}]
    harmless(run_page(examine(model, images), log=log, notes={MARKUP[0]: MARKUP[1]}), "b")


def test_files_with_names_of_markup(tmp_path: Path) -> None:
    """Names of images reach pages and terminals too."""
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number, file in enumerate(['"><img src=x onerror=alert(1)>', "<b>bold<b>", "a\x1b[2Jb"]):
            Image.new("RGB", (24, 24), (60 * number, 0, 0)).save(tmp_path / "photos" / name / f"{file}.png")
    images = open_data(tmp_path / "photos", "all")
    clip = tiny_clip(dtype=torch.float32)
    page = run_page(examine(DeAR(clip, ["cat", "dog"], roles=mixed_roles()), images))
    harmless(page, "b")
    assert "<b>bold<b>" not in page
    harmless(roles_page(mixed_roles(), measure_heads(mixed_roles(), clip, images)), "b")
    for path in (tmp_path / "photos").rglob("*\x1b*"):
        path.write_bytes(b"no image")
    code = "from dear.cli import main; main()"
    words = ["data", "check", str(tmp_path / "photos")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "unreadable" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


def test_the_results_page(tmp_path: Path) -> None:
    grid, cells = Grid(tmp_path), []
    for number, name in enumerate(MARKUP):
        cell = make_cell("base-to-novel", f"method {name}", f"set {name}", number, 16, name)
        weights = {"class": 0.5, name: 0.5}
        made = {"dear": name, "torch": name, "hardware": name}
        modes = {name: {"base": 0.5, "novel": 0.5, "hm": 0.5}}
        result = {"modes": modes, "facts": {"fusion_weights": weights}, "made_with": made}
        grid.store(Outcome(cell, result))
        cells.append(cell)
    *_, page = write_protocol(grid, "base-to-novel", cells, MARKUP[0], {MARKUP[1]: MARKUP[2]})
    text = page.read_text()
    harmless(text)
    assert "Content-Security-Policy" in text
    for _, _, figure in figures_of([read_cell(path) for path in sorted((tmp_path / "cells").glob("*.json"))]):
        unmarked(json.dumps(json.loads(figure.to_json())))
        assert "&lt;b&gt;bold" in json.dumps(json.loads(figure.to_json()))


def test_the_studio() -> None:
    image = Image.new("RGB", (8, 8))
    answers = {MARKUP[0]: tuple((name, 0.1) for name in MARKUP)}
    harmless(verdicts_html([Verdict(name, image, answers) for name in MARKUP]), "article")
    for name in MARKUP:
        accuracy = HeldOutAccuracy(1, 1, 0.5, {name: 0.5})
        suspects = (Thumbnail("data:,", name, (("name", name),)),)
        result = TrainingResult(1, 1, 0, accuracy, name, (name,), suspects, 1)
        harmless(status_html(TrainingStatus("failed", name, result=result)))
    roles = hostile_roles()
    harmless(map_html(roles))
    role = roles[3, 0]
    harmless(
        describe_html(HeadView((3, 0), role.phrases[0], role.phrases[0], role, role.phrases[0], [], [], []))
    )


def test_errors_on_the_studios_page_are_escaped() -> None:
    pytest.importorskip("gradio")
    from dear.studio.parts import errors_as_message

    @errors_as_message
    def fails() -> None:
        raise DearError(MARKUP[0])

    with pytest.raises(Exception) as caught:
        fails()
    assert "<script>" not in str(caught.value)
