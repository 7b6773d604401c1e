"""The map of heads as a component: a row per layer, a cell per head, a legend that explains the kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dear.heads.names import KIND_TITLES, KINDS
from dear.heads.roles import Role, RoleMap
from dear.report.look import KIND_COLORS, concept_colors, ink_on

KIND_MEANINGS = {
    "core": "looks at one attribute that has a token of its own; DeAR lets it read that token only",
    "other": "looks at one concept without a token, such as animals or text; new tokens are hidden from it",
    "generalization": "looks at general properties such as style; new tokens are hidden from it, so that "
    "what CLIP knows about new classes stays",
    "mixed": "looks at several concepts at once; it reads all tokens",
}
"""What each kind of head does, and what DeAR does with it."""


@dataclass(frozen=True)
class HeadCell:
    """One head of the map."""

    key: str  #: "12-7"
    text: str  #: concept, or kind
    short: str  #: three letters, for narrow screens
    bits: str  #: Concept Entropy, empty where it was not measured
    title: str  #: layer, head and role in words
    phrases: str
    color: str
    ink: str


@dataclass(frozen=True)
class LegendEntry:
    """One line of the legend."""

    text: str
    color: str
    count: int
    meaning: str


@dataclass(frozen=True)
class HeadMap:
    """The map: rows of cells, the last layer first, as images of networks are drawn."""

    heads: int
    rows: tuple[tuple[int, tuple[HeadCell, ...]], ...]
    legend: tuple[LegendEntry, ...]


def head_map(roles: RoleMap) -> HeadMap:
    """The component's values for a role map.

    >>> head_map(RoleMap.table2()).rows[0][0]
    12
    """
    colors = colors_of(roles)
    short = short_names([_text(role) for _, role in roles])
    rows = tuple(
        (layer, tuple(_cell((layer, head), roles[layer, head], colors, short) for head in range(roles.heads)))
        for layer in reversed(roles.layers)
    )
    counts = roles.counts()
    core = Counter(role.concept for _, role in roles if role.kind == "core")
    legend = [LegendEntry(f"Core: {name}", colors[name], core[name], "") for name in roles.core]
    legend += [
        LegendEntry(KIND_TITLES[kind], KIND_COLORS[kind], counts[kind], KIND_MEANINGS[kind])
        for kind in KINDS
        if kind != "core"
    ]
    return HeadMap(roles.heads, rows, tuple(legend))


def colors_of(roles: RoleMap) -> dict[str, str]:
    """The color of every concept of a map."""
    names = {concept for _, role in roles for concept in role.shares}
    return concept_colors(roles.core, names | set(roles.evidence.get("concept_of", {}).values()))


def role_title(role: Role) -> str:
    """The role in words: kind, and concept where there is one."""
    return KIND_TITLES[role.kind] + (f" ({role.concept})" if role.concept else "")


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Three letters per name, different for different names where that is possible.

    >>> short_names(["Color", "Text", "Texture"])
    {'Color': 'Col', 'Text': 'Txt', 'Texture': 'Tre'}
    """
    starts = Counter(name[:3] for name in set(names))
    return {name: name[:3] if starts[name[:3]] == 1 else name[:1] + name[-2:] for name in names}


def _text(role: Role) -> str:
    return role.concept or {"generalization": "general"}.get(role.kind, role.kind)


def _cell(key: tuple[int, int], role: Role, colors: dict[str, str], short: dict[str, str]) -> HeadCell:
    color = colors[str(role.concept)] if role.kind == "core" else KIND_COLORS[role.kind]
    text = _text(role)
    return HeadCell(
        key=f"{key[0]}-{key[1]}",
        text=text,
        short=short[text],
        bits="" if role.entropy is None else f"{role.entropy:.1f}",
        title=f"layer {key[0]}, head {key[1]}: {role_title(role)}",
        phrases="; ".join(role.phrases[:5]),
        color=color,
        ink=ink_on(color),
    )
