"""The sections of the page about roles, each as HTML text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dear.heads.names import KIND_TITLES, KINDS
from dear.heads.roles import Role, RoleMap
from dear.report.roles_data import Evidence
from dear.report.svg import line_chart, scatter, tag

# Hues that stay apart for color-blind readers; dark ones take white letters.
_CORE_COLORS = ("#d55e00", "#e6a800", "#009e73", "#0072b2", "#cc79a7", "#7a5cc0", "#8a6d3b")
_OTHER_COLORS = (
    "#9c8fb5", "#b59c8f", "#8fb5ac", "#a9b58f", "#b58f9f", "#8fa3b5", "#b3ad7d", "#a0a0a0", "#6f8f6f",
    "#8f6f8f",
)  # fmt: skip
_KIND_COLORS = {"other": "#b9b4c7", "generalization": "#7cc3ee", "mixed": "#eceae3"}
_DARK = {"#d55e00", "#009e73", "#0072b2", "#7a5cc0", "#8a6d3b"}

_AGREEMENT = {
    "same_name": "phrases whose concept is the one they were written for",
    "purity": "phrases that bear the commonest tag of their cluster",
    "adjusted_rand": "adjusted Rand index, concepts against tags",
    "mutual_information": "normalized mutual information, concepts against tags",
    "cluster_mutual_information": "the same for clusters before naming",
}


def colors_of(roles: RoleMap) -> dict[str, str]:
    """A color for every concept: strong ones for the core, quiet ones for the others."""
    names = {concept for _, role in roles for concept in role.shares}
    names |= set(roles.evidence.get("concept_of", {}).values())
    others = sorted(names - set(roles.core))
    colors = {name: _CORE_COLORS[place % len(_CORE_COLORS)] for place, name in enumerate(roles.core)}
    colors |= {name: _OTHER_COLORS[place % len(_OTHER_COLORS)] for place, name in enumerate(others)}
    return colors


def role_title(role: Role) -> str:
    """The role in words: kind, and concept where there is one."""
    return KIND_TITLES[role.kind] + (f" ({role.concept})" if role.concept else "")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """A plain table; cells are HTML, columns named in `numbers` stand to the right."""

    def cell(name: str, place: int, content: str) -> str:
        return tag(name, content, class_="number" if place in numbers else None)

    head = "".join(cell("th", place, escape(title)) for place, title in enumerate(columns))
    body = "".join(
        tag("tr", "".join(cell("td", place, content) for place, content in enumerate(row))) for row in rows
    )
    return tag("table", f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>", class_="plain")


def the_map(roles: RoleMap, colors: Mapping[str, str]) -> str:
    """The map, its legend and the panel that the script fills."""
    rows = []
    for layer in roles.layers:
        cells = "".join(_cell(layer, head, roles[layer, head], colors) for head in range(roles.heads))
        rows.append(tag("tr", tag("th", str(layer), scope="row") + cells))
    top = "".join(tag("th", str(head), scope="col") for head in range(roles.heads))
    core = [(f"Core: {concept}", colors[concept]) for concept in roles.core]
    legend = [*core, *((KIND_TITLES[kind], _KIND_COLORS[kind]) for kind in KINDS if kind != "core")]
    items = "".join(tag("li", _swatch(color) + escape(name)) for name, color in legend)
    layout = "two" if roles.heads <= 8 else "one"  # names of concepts need room
    grid = f"<thead><tr><td></td>{top}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f"""<section><h2>The map</h2><div class="{layout}"><div>
{tag("table", grid, class_="map", data_heads=roles.heads)}<ul class="legend">{items}</ul>
<p class="soft">Rows are layers, columns heads. A cell names the concept that leads and the Concept Entropy
in bits: 0 when all phrases of the head lie in one concept.
<span class="screen">Choose a head with the mouse, or with Tab and the arrow keys.</span></p></div>
<div id="panel" aria-live="polite"><noscript>All heads are listed at the end.</noscript></div></div></section>
"""


def _cell(layer: int, head: int, role: Role, colors: Mapping[str, str]) -> str:
    """One head of the map: a button."""
    color = colors.get(str(role.concept), "#fff") if role.kind == "core" else _KIND_COLORS[role.kind]
    short = role.concept or {"generalization": "general", "mixed": "mixed"}.get(role.kind, "")
    bits = "" if role.entropy is None else tag("span", f"{role.entropy:.1f}")
    name = f"layer {layer}, head {head}: {role_title(role)}"
    button = tag(
        "button",
        escape(short[:9]) + bits,
        type="button",
        data_key=f"{layer}-{head}",
        aria_pressed="false",
        aria_label=name,
        title=name,
        style=f"background:{color}",
        class_="dark" if color in _DARK else None,
    )
    return tag("td", button)


def _swatch(color: str) -> str:
    return tag("i", "", style=f"background:{color}")


def concepts(roles: RoleMap, evidence: Evidence, colors: Mapping[str, str]) -> str:
    """The phrases in a plane, and how well clusters and tags agree; nothing for a map without concepts."""
    found = roles.evidence.get("concepts")
    if not isinstance(found, dict):
        return ""
    of = roles.evidence.get("concept_of", {})
    plane = ""
    names = [phrase for phrase in evidence.plane if phrase in of]
    if names:
        points = [evidence.plane[name] for name in names]
        title = "The picked phrases in a plane, colored by concept"
        plane = f"""<figure>{scatter(points, names, [of[name] for name in names], colors, title)}
<figcaption>Every picked phrase, near to those that mean the like (t-SNE of sentence embeddings);
point at one to read it.</figcaption></figure>"""
    clustered = found.get("way", "clusters") == "clusters"
    columns = ("concept", "phrases", "clusters") if clustered else ("concept", "phrases")
    rows = [
        (_swatch(colors.get(name, "#aaa")) + escape(name), *(f"{entry[column]:d}" for column in columns[1:]))
        for name, entry in found.get("concepts", {}).items()
    ]
    agreement = [
        (escape(_AGREEMENT.get(name, name)), f"{value:.3f}")
        for name, value in (found.get("agreement") or {}).items()
    ]
    checked = table(("agreement with the tags of the corpus", ""), agreement, (1,)) if agreement else ""
    return f"""<section><h2>The concepts</h2><div class="two"><div>{plane}</div><div>
<p>{int(found.get("phrases", 0))} different phrases were picked by the heads; {_how_named(found)}</p>
{table(columns, rows, range(1, len(columns)))}{checked}</div></div></section>
"""


def _how_named(found: Mapping[str, Any]) -> str:
    """Where the concepts of the phrases come from, as the rest of a sentence."""
    way = found.get("way", "clusters")
    if way == "tags":
        return "each counts for the concept that the corpus was written for."
    if way == "fixed":
        return "each counts for the nearest of the concepts that were given."
    noise = f"{100 * float(found.get('noise', 0)):.0f} %"
    return (
        f"they form {int(found.get('clusters', 0))} clusters ({noise} of the phrases stood apart and went to "
        "the nearest one). Clusters of one name count as one concept."
    )


def effects(roles: RoleMap, evidence: Evidence) -> str:
    """What mean-ablating layers and roles costs; nothing without labeled images."""
    if not evidence.layers or evidence.accuracy is None:
        return ""
    chart = line_chart(
        [int(row["layer"]) for row in evidence.layers],
        {
            "this layer ablated": [row["accuracy"] for row in evidence.layers],
            "all layers up to it ablated": [row["accuracy_up_to"] for row in evidence.layers],
        },
        ("#0072b2", "#d55e00"),
        "Zero-shot accuracy with the heads of layers replaced by their mean",
        "layer",
        "zero-shot accuracy",
        evidence.accuracy,
        (roles.layers[0], roles.layers[-1]),
    )
    rows = [("nothing", "0", f"{evidence.accuracy:.3f}", "")]
    for row in evidence.roles:
        name = KIND_TITLES[row["kind"]] + (f": {row['concept']}" if row["concept"] else "")
        numbers = (str(row["heads"]), f"{row['accuracy']:.3f}", f"{row['control']:.3f}")
        rows.append((escape(name), *numbers))
    replaced = table(("replaced by their mean", "heads", "accuracy", "random heads"), rows, (1, 2, 3))
    return f"""<section><h2>What heads are worth</h2><div class="two"><figure>{chart}
<figcaption>Direct effect on {evidence.images:,} images: the contributions of a layer's heads are replaced
by their mean over the images. Dotted: nothing replaced. Shaded: layers of the map.</figcaption></figure>
<div><p>The same for the heads of a role, beside as many random heads of the same layers.</p>
{replaced}</div></div></section>
"""


def all_heads(roles: RoleMap) -> str:
    """Every head with its phrases: for paper, and for readers without scripts."""
    rows = (
        (
            f"{layer}, {head}",
            escape(role_title(role)),
            "" if role.entropy is None else f"{role.entropy:.2f}",
            escape(" · ".join(role.phrases)),
        )
        for (layer, head), role in roles
    )
    listed = table(("layer, head", "role", "bits", "phrases"), rows, (0, 2))
    return f"<section><h2>All heads</h2>{listed}</section>\n"
