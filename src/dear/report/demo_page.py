"""The page that `dear demo` ends with: the world, the heads, what adaptation gained, what attributes see."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import torch

from dear._io.files import write_atomic
from dear.clip.model import Clip
from dear.data.images import ImageSet
from dear.heads.roles import RoleMap
from dear.methods import build_method
from dear.report import figures
from dear.report.page import Figures, document, percent, section, table, thumbnail
from dear.report.roles_sections import colors_of, role_title
from dear.train.evaluate import evaluate
from dear.workflows.retrieve import gallery_features, rank

if TYPE_CHECKING:
    from dear.workflows.demo import Story

_STYLE = """
.heads { border-collapse: separate; border-spacing: 3px; width: 100%; table-layout: fixed; }
.heads td, .heads th { border: 0; padding: .35rem .1rem; text-align: center; font-size: .72rem;
  border-radius: .3rem; overflow: hidden; }
.images.small { grid-template-columns: repeat(auto-fill, minmax(5.6rem, 1fr)); gap: .5rem; }
"""


def write_demo_page(
    path: str | os.PathLike[str], clip: Clip, roles: RoleMap, stories: Sequence[Story]
) -> None:
    """Write the page to the file `path`."""
    show = Figures()
    first = stories[0]
    parts = [
        "<h1>dear: adapting a CLIP head by head</h1>",
        '<p class="lead">Everything on this page was made by <code>dear demo</code> on this machine, '
        "from what comes with the package: no downloads, no dataset.</p>",
        section(
            "What each head does",
            "Each cell is an attention head of the image tower's last layers, named after the concept that "
            "its phrases speak of. Core heads may read the token of their own attribute; other specialized "
            "and generalization heads are shielded from all new tokens; mixed heads read everything.",
            _map(roles),
        ),
    ]
    parts += [_task(story, clip, show) for story in stories]
    parts.append(_retrieval(first))
    write_atomic(path, document("dear demo", parts, _STYLE))


def _map(roles: RoleMap) -> str:
    """Layers by heads, colored by role."""
    colors = colors_of(roles)
    plain = {"other": "#dfe3e8", "generalization": "#f3e3f0", "mixed": "#ffffff"}
    rows = []
    for layer in roles.layers:
        cells = []
        for head in range(roles.heads):
            role = roles[layer, head]
            color = colors.get(str(role.concept), "#fff") if role.kind == "core" else plain[role.kind]
            said = escape(f"{role_title(role)}: {'; '.join(role.phrases[:5])}")
            word = escape(role.concept or role.kind)
            cells.append(f'<td style="background:{color}" title="{said}">{word}</td>')
        rows.append(f'<tr><th scope="row">{layer}</th>{"".join(cells)}</tr>')
    top = "".join(f'<th scope="col">{head}</th>' for head in range(roles.heads))
    return f'<div class="scroll"><table class="heads"><tr><th></th>{top}</tr>{"".join(rows)}</table></div>'


def _task(story: Story, clip: Clip, show: Figures) -> str:
    """Accuracies, fusion weights and images of one task."""
    names = {row: row.title.removeprefix("DeAR, ") for row in story.rows}
    groups = {
        "trained classes": {names[row]: row.base for row in story.rows},
        "new classes": {names[row]: row.novel for row in story.rows},
        "harmonic mean": {names[row]: row.hm for row in story.rows},
    }
    rows = [[row.title, percent(row.base), percent(row.novel), percent(row.hm)] for row in story.rows]
    return section(
        f"world:{story.task}",
        f"{len(story.classes)} classes learned from 16 images each in {story.seconds:.0f} seconds; "
        f"{len(story.novel.classes)} classes were never trained.",
        show.html(figures.accuracy_bars(groups), f"Accuracies on {story.task}"),
        table(("", "base", "novel", "HM"), rows),
        "<h3>Whose vote counts</h3>",
        show.html(figures.fusion_weights(story.weights), "Weights of the class token and the attributes"),
        "<h3>Images that adaptation put right</h3>",
        _mended(story, clip),
    )


def _mended(story: Story, clip: Clip, most: int = 8) -> str:
    """Test images that zero-shot got wrong and DeAR gets right."""
    frozen = build_method("zeroshot", clip, story.base.classes, template=story.base.template)
    before = evaluate(frozen, story.base).answers["default"]
    after = evaluate(story.model, story.base).answers["fused"]
    labels, classes = story.base.labels, story.base.classes
    rows = ((before != labels) & (after == labels)).nonzero()[:, 0]
    rows = rows[torch.linspace(0, len(rows) - 1, min(most, len(rows))).long()] if len(rows) else rows
    items = [
        (index, f"was: {classes[int(before[index])]}", f"now: {classes[int(after[index])]}")
        for index in rows.tolist()
    ]
    cells = "".join(
        f'<li><img src="{thumbnail(story.base.image(index))}" alt="">'
        f'<p class="wrong">{escape(was)}</p><p class="right">{escape(now)}</p></li>'
        for index, was, now in items
    )
    return f'<ul class="images">{cells}</ul>'


def _retrieval(story: Story, top: int = 6) -> str:
    """One query, and what is most alike in each attribute."""
    gallery: ImageSet = story.base.subset(range(0, len(story.base), 2))
    query = story.base.image(1)
    found = rank(story.model, query, gallery_features(story.model, gallery), gallery, top)
    rows = [f'<h3>The query</h3><ul class="images small"><li><img src="{thumbnail(query)}" alt=""></li></ul>']
    for one in found:
        cells = "".join(
            f'<li><img src="{thumbnail(gallery.image(index))}" alt=""><p>{similarity:.2f}</p></li>'
            for index, similarity in zip(one.indices, one.similarity, strict=True)
        )
        rows.append(f'<h3>Alike in {escape(one.attribute)}</h3><ul class="images small">{cells}</ul>')
    return section(
        "Alike in what?",
        "Each attribute token has a feature of its own, so images can be compared in one attribute alone.",
        *rows,
    )
