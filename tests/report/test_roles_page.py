"""The page about roles: whole, self-contained, and safe whatever the names in it."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from msgspec import structs
from PIL import Image

from dear.clip.config import ClipConfig, TextConfig, VisionConfig
from dear.clip.model import Clip
from dear.data.images import ListedImages
from dear.errors import RoleError
from dear.heads.corpus import Corpus, load_corpus
from dear.heads.discover import discover_roles
from dear.heads.role import Role
from dear.heads.roles import RoleMap
from dear.report.head_figures import layer_effects_figure, phrase_plane_figure
from dear.studio.heads import map_html
from dear.tasks.roles.evidence import HeadEvidence, measure_heads
from dear.tasks.roles.page import roles_page, write_roles_page
from dear.tasks.roles.quality import map_quality

EVIL = '</script><script>alert("x")</script><b>&'


class Page(HTMLParser):
    """Counts elements, collects text, checks that they nest."""

    VOID = ("meta", "img", "input", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.links = [], {}, []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def labeled() -> ListedImages:
    """A labeled image set in memory."""
    values = np.random.default_rng(0).integers(0, 256, (14, 32, 32, 3), dtype=np.uint8)
    items = tuple(Image.fromarray(value) for value in values)
    return ListedImages(items, torch.arange(14) % 2, ("dog", EVIL), name="labeled")


@pytest.fixture(scope="module")
def backbone():
    torch.manual_seed(0)
    vision = VisionConfig(width=24, layers=3, heads=2, mlp=48, image_size=32, patch_size=8)
    return Clip(ClipConfig(vision, TextConfig(width=16, layers=1, heads=2, mlp=32), 20), name="tiny " + EVIL)


@pytest.fixture(scope="module")
def roles(backbone):
    words = Corpus("some", load_corpus().phrases[::40])
    found = discover_roles(backbone, labeled(), layers=[2, 3], corpus=words, phrases=8, concepts="tags")
    # Untrained heads are close to chance, and their concepts would not be shown.
    return structs.replace(found, evidence={k: v for k, v in found.evidence.items() if k != "information"})


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_page_of_table2_needs_nothing_but_the_map():
    page = roles_page(RoleMap.table2())
    parsed = Page(page)
    assert parsed.seen["button"] == 48
    assert parsed.links == []
    assert "28 Core Attribute" in page
    assert len(data_of(page)["heads"]) == 48


def test_whole_page_with_images(tmp_path, backbone, roles):
    stages = set()
    out = tmp_path / "page.html"
    evidence = measure_heads(
        roles, backbone, labeled(), progress=lambda stage, done, total: stages.add(stage)
    )
    write_roles_page(roles, out, evidence, {"Adapt with it:": "dear adapt --roles <file>"})
    page = out.read_text(encoding="utf-8")
    parsed = Page(page)
    data = data_of(page)
    assert {"plane", "images"} <= stages
    assert "0 clusters" not in page  # the concepts came from tags
    assert page.count("Plotly.newPlot(") == (2 if evidence.plane else 1)  # the plane and the layers
    assert page.count("plotly.js v") == 1
    assert "dear adapt --roles &lt;file&gt;" in page
    assert "14 images" in page
    assert all(link.startswith("data:") for link in parsed.links)  # plotly names a server in a comment
    for key, role in roles:
        shown = data["heads"]["{}-{}".format(*key)]
        assert shown["phrases"] == list(role.phrases)
        assert len(shown["most"]) == len(shown["least"]) == 4
        for image, _, digits in shown["most"] + shown["least"]:
            assert data["thumbnails"][str(image)].startswith("data:image/jpeg;base64,")
            assert len(digits) == data["side"] ** 2 == 16
            assert digits.isdigit()
            assert "9" in digits
        scores = [score for _, score, _ in shown["most"]] + [score for _, score, _ in shown["least"]][::-1]
        assert scores == sorted(scores, reverse=True)


def test_nothing_a_user_wrote_becomes_markup(backbone):
    table = {(1, h): Role("core", "Color", 0.0, {"Color": 1.0}, (EVIL,)) for h in range(2)}
    roles = RoleMap(
        table,
        2,
        backbone=EVIL,
        rule=EVIL,
        evidence={"image_source": EVIL, "image_count": 3, "concept_of": {EVIL: "Color"}},
    )
    page = roles_page(roles, measure_heads(roles, backbone, labeled()))
    Page(page)
    assert 'alert("x")</script>' not in page
    assert "<b>&" not in page
    assert data_of(page)["heads"]["1-0"]["phrases"] == [EVIL]


def test_images_of_other_weights_are_refused(backbone, roles):
    torch.manual_seed(1)
    other = Clip(backbone.config)
    with pytest.raises(RoleError):
        measure_heads(roles, other, labeled())
    measure_heads(roles, other, labeled(), heads=[(3, 1)], allow_other=True)
    with pytest.raises(RoleError):
        measure_heads(roles, backbone, labeled(), heads=[(1, 0)])


def test_images_of_one_class_have_no_effects(backbone, roles):
    images = labeled().select_classes(["dog"])
    found = measure_heads(roles, backbone, images, heads=[(3, 0)], limit=5)
    assert found.images == 5
    assert found.layers == ()
    assert set(found.heads) == {(3, 0)}
    assert set(found.thumbnails) <= {0, 1, 2, 4, 5}
    Page(roles_page(roles, found))


def test_the_page_says_what_the_kinds_mean_and_marks_doubts():
    page = roles_page(RoleMap.table2())
    for kind in ("Core Attribute", "Other Specialized", "Generalization", "Mixed"):
        assert f"<dt>{kind}</dt>" in page
    shields_nothing = RoleMap.uniform("mixed", [1], 2)
    assert "0 of 2 heads" in roles_page(shields_nothing)
    assert "2 of 2 heads" in roles_page(shields_nothing)
    assert " of 48 heads have " not in page


def test_a_map_close_to_chance_counts_no_shielded_heads():
    chance = {"information": {"bits": 0.4, "rotated": 0.39, "deviation": 0.02, "rotations": 8}}
    clear = RoleMap.table2()
    poor = structs.replace(clear, evidence=chance)
    assert poor.caveat() in roles_page(poor)
    assert " of 48 heads" in roles_page(clear)
    assert " of 48 heads" not in roles_page(poor)


def test_figures_survive_flat_and_single_values():
    rows = [{"layer": 1, "accuracy": 0.5, "accuracy_up_to": 0.5}]
    figure = layer_effects_figure(rows, 0.5, (1, 1))
    assert list(figure.data[0].y) == [50.0]
    plane = phrase_plane_figure({"<b>": (1.0, 1.0), "no concept": (2.0, 2.0)}, {"<b>": "&"}, {})
    assert [list(trace.text) for trace in plane.data] == [["&lt;b&gt;"]]


def test_a_map_close_to_chance_is_shown_once_with_its_caveat_and_without_concepts_or_phrases():
    chance = {"bits": 0.4, "rotated": 0.39, "deviation": 0.02, "rotations": 8}
    clear = RoleMap.table2()
    poor = structs.replace(clear, evidence={**clear.evidence, "information": chance})
    page, usual = roles_page(poor), roles_page(clear)
    phrase = next(role.phrases[0] for _, role in clear if role.kind == "core")
    assert phrase in usual
    assert "Core: Location" in usual
    assert phrase not in page
    assert not any(f"Core: {name}" in page or f"({name})" in page for name in clear.core)
    assert not any(head["meaning"].startswith("Such a head") for head in data_of(page)["heads"].values())
    assert all(head["meaning"].startswith("Such a head") for head in data_of(usual)["heads"].values())
    assert page.count(poor.caveat()) == 1
    assert poor.caveat() in map_html(poor)
    assert not any(name in map_html(poor) for name in clear.core)
    assert all(name in map_html(clear) for name in clear.core)
    assert not any(name in poor._repr_html_() for name in clear.core)


@pytest.mark.parametrize(("chance", "doubtful"), [(0.2, False), (0.74, True)])
def test_a_stability_close_to_chance_is_doubtful(chance, doubtful):
    roles = structs.replace(RoleMap.table2(), evidence={"stability": {"share": 0.79, "chance": chance}})
    sentences = dict(map_quality(roles, HeadEvidence()))
    assert [mark for sentence, mark in sentences.items() if f"{100 * chance:.1f}% by chance" in sentence] == [
        doubtful
    ]
