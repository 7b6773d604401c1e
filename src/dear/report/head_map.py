"""The map of heads as a component: a row per layer, a cell per head, a legend that explains the kinds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dear.heads.names import KIND_TITLES, KINDS
from dear.heads.role import Role
from dear.heads.roles import RoleMap
from dear.report.look import KIND_COLORS, concept_colors, ink_on

KIND_MEANINGS = {
    "core": "responds mostly to one attribute that has its own token; in DeAR it reads only that token",
    "other": "responds mostly to one concept without a token, such as animals or text; new tokens are hidden "
    "from it",
    "generalization": "responds to general properties such as style; new tokens are hidden from it, so that "
    "what CLIP knows about new classes stays",
    "mixed": "responds to several concepts; it reads all tokens",
}
"""What each kind of head does, and what DeAR does with it."""
UNKNOWN = "unknown"  #: the role of a head of a map that is close to chance


@dataclass(frozen=True)
class HeadMap:
    """The map: rows of cells, the last layer first, as images of networks are drawn."""

    heads: int
    rows: tuple[tuple[int, tuple[dict[str, str], ...]], ...]  #: (layer, cells)
    legend: tuple[tuple[str, str, int], ...]  #: (text, color, heads)


def head_map(roles: RoleMap, only: Collection[tuple[int, int]] | None = None) -> HeadMap:
    """The component's values for a role map; with `only`, all other heads are gray and there is no legend.

    A map that is close to chance is shown without roles.

    >>> head_map(RoleMap.table2()).rows[0][0]
    12
    """
    unknown, roles = bool(roles.caveat()), roles.for_display()
    colors = colors_of(roles)
    texts = {key: UNKNOWN if unknown else _text(role) for key, role in roles}
    short = short_names(list(texts.values()))

    def cell(layer: int, head: int) -> dict[str, str]:
        role, text = roles[layer, head], texts[layer, head]
        color = colors[str(role.concept)] if role.kind == "core" else KIND_COLORS[role.kind]
        gray = only is not None and (layer, head) not in only
        return {
            "key": f"{layer}-{head}",
            "text": text,
            "short": short[text],  # for narrow screens
            "bits": "" if role.entropy is None else f"{role.entropy:.1f}",  # Concept Entropy
            "title": f"layer {layer}, head {head}: {UNKNOWN if unknown else role_title(role)}",
            "phrases": "; ".join(role.phrases[:5]),
            "color": "#ececec" if gray else color,
            "ink": "#666666" if gray else ink_on(color),
        }

    rows = [(layer, tuple(cell(layer, head) for head in range(roles.heads))) for layer in roles.layers[::-1]]
    legend: list[tuple[str, str, int]] = []
    if only is None and not unknown:
        counts, core = roles.counts(), Counter(role.concept for _, role in roles if role.kind == "core")
        legend = [(f"Core: {name}", colors[name], core[name]) for name in roles.core if core]
        legend += [(KIND_TITLES[kind], KIND_COLORS[kind], counts[kind]) for kind in KINDS if kind != "core"]
    return HeadMap(roles.heads, tuple(rows), tuple(legend))


def describe_role(roles: RoleMap, key: tuple[int, int]) -> tuple[str, str]:
    """The role of a head in a few words, and a sentence about such heads.

    >>> describe_role(RoleMap.table2(), (12, 7))[0]
    'Core Attribute (Object)'
    """
    if roles.caveat():
        return UNKNOWN, "Its role is not known, because the role map is close to chance."
    role = roles[key]
    return role_title(role), f"Such a head {KIND_MEANINGS[role.kind]}."


def kind_meanings() -> dict[str, str]:
    """What each kind of head does, by its title."""
    return {KIND_TITLES[kind]: KIND_MEANINGS[kind] for kind in KINDS}


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
