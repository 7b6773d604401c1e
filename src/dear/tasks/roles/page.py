"""The page about the heads of a backbone: what each does, how good the map is, and what to do with it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from dear.heads.names import KIND_TITLES, KINDS
from dear.heads.roles import RoleMap
from dear.report.head_figures import layer_effects_figure, phrase_plane_figure
from dear.report.head_map import colors_of, describe_role, head_map, kind_meanings, role_title
from dear.report.page import Table, percent, render
from dear.tasks.roles.evidence import HeadEvidence
from dear.tasks.roles.quality import map_quality, specialization_notice
from dear.utils.files import write_atomic

_AGREEMENT = {
    "same_name": "phrases whose concept is the one they were written for",
    "purity": "phrases that bear the commonest tag of their cluster",
    "adjusted_rand": "adjusted Rand index, concepts against tags",
    "mutual_information": "normalized mutual information, concepts against tags",
    "cluster_mutual_information": "the same for clusters before naming",
}


def write_roles_page(
    roles: RoleMap,
    out: str | os.PathLike[str],
    evidence: HeadEvidence | None = None,
    next_steps: Mapping[str, str] | None = None,
) -> None:
    """Write the page about `roles` to the file `out`, whole or not at all; arguments as in `roles_page`."""
    write_atomic(out, roles_page(roles, evidence, next_steps))


def roles_page(
    roles: RoleMap, evidence: HeadEvidence | None = None, next_steps: Mapping[str, str] | None = None
) -> str:
    """The page as HTML text.

    Args:
        roles: the map.
        evidence: what was measured on images; None: the page shows the map alone.
        next_steps: what a reader can do with the map, sentence -> command.

    >>> page = roles_page(RoleMap.table2())
    >>> page.startswith("<!doctype html>"), "Photo taken in Namib Desert" in page
    (True, True)
    """
    evidence, shown = evidence or HeadEvidence(), roles.for_display()
    return render(
        "roles.html",
        title=f"What the heads of {roles.backbone or 'this backbone'} do",
        roles=shown,
        notice=specialization_notice(roles),
        map=head_map(roles),
        counts=", ".join(f"{shown.counts()[kind]} {KIND_TITLES[kind]}" for kind in KINDS),
        known=not roles.caveat(),
        kinds=kind_meanings(),
        quality=map_quality(roles, evidence),
        next_steps=next_steps or {},
        concepts=_concepts(shown, evidence),
        effects=_effects(roles, evidence),
        all_heads=_all_heads(shown),
        provenance=_provenance(roles),
        data=Markup(_data(roles, evidence)),
    )


def _concepts(roles: RoleMap, evidence: HeadEvidence) -> dict[str, Any]:
    """The section about concepts; empty for a map without any."""
    clusters = roles.evidence.get("concepts")
    if not isinstance(clusters, dict):
        return {}
    concept_of = roles.evidence.get("concept_of", {})
    clustered = clusters.get("way", "clusters") == "clusters"
    columns = ("concept", "phrases", "clusters") if clustered else ("concept", "phrases")
    rows = tuple(
        (name, *(f"{entry[column]:d}" for column in columns[1:]))
        for name, entry in clusters.get("concepts", {}).items()
    )
    agreement = tuple(
        (_AGREEMENT.get(name, name), f"{value:.3f}")
        for name, value in (clusters.get("agreement") or {}).items()
    )
    plane = {phrase: place for phrase, place in evidence.plane.items() if phrase in concept_of}
    return {
        "sentence": f"{int(clusters.get('phrases', 0))} different phrases were picked by the heads; "
        + _naming_sentence(clusters),
        "table": Table(columns, rows),
        "agreement": Table(("agreement with the tags of the corpus", ""), agreement),
        "plane": phrase_plane_figure(plane, concept_of, colors_of(roles)) if plane else None,
    }


def _naming_sentence(clusters: Mapping[str, Any]) -> str:
    """Where the concepts of the phrases come from, as the rest of a sentence."""
    way = clusters.get("way", "clusters")
    if way == "tags":
        return "each counts for the concept that the corpus was written for."
    if way == "fixed":
        return "each counts for the nearest of the concepts that were given."
    noise = percent(float(clusters.get("noise", 0)))
    return (
        f"they form {int(clusters.get('clusters', 0))} clusters ({noise} of the phrases belonged to none and "
        "went to the nearest one). Clusters of one name count as one concept."
    )


def _effects(roles: RoleMap, evidence: HeadEvidence) -> dict[str, Any]:
    """What replacing layers and roles by their mean costs; empty without labeled images."""
    if not evidence.layers or evidence.accuracy is None:
        return {}
    rows = [("nothing", "0", f"{100 * evidence.accuracy:.1f}", "")]
    for row in () if roles.caveat() else evidence.roles:
        name = KIND_TITLES[row["kind"]] + (f": {row['concept']}" if row["concept"] else "")
        numbers = (f"{100 * row['accuracy']:.1f}", f"{100 * row['control']:.1f}")
        rows.append((name, str(row["heads"]), *numbers))
    span = (roles.layers[0], roles.layers[-1])
    return {
        "figure": layer_effects_figure(evidence.layers, evidence.accuracy, span),
        "images": f"{evidence.images:,}",
        "table": None
        if roles.caveat()
        else Table(("replaced by their mean", "heads", "accuracy (%)", "random heads (%)"), tuple(rows)),
    }


def _all_heads(roles: RoleMap) -> Sequence[tuple[str, str, str, str]]:
    """Every head with its phrases: for paper, and for readers without scripts."""
    return [
        (
            f"{layer}, {head}",
            role_title(role),
            "" if role.entropy is None else f"{role.entropy:.2f}",
            " · ".join(role.phrases),
        )
        for (layer, head), role in roles
    ]


def _provenance(roles: RoleMap) -> str:
    corpus = roles.evidence.get("corpus") or {}
    parts = [f"rule {roles.rule} {json.dumps(dict(roles.parameters))}"]
    if roles.evidence.get("image_count"):
        source = roles.evidence.get("image_source") or "given images"
        parts.append(f"{int(roles.evidence['image_count']):,} images ({source})")
    if corpus:
        parts.append(f"{int(corpus.get('phrases', 0)):,} phrases (corpus {corpus.get('name')})")
    parts.append(f"weights {roles.fingerprint or 'not named'}")
    return "; ".join(parts)


def _data(roles: RoleMap, evidence: HeadEvidence) -> str:
    """What the script shows, as JSON that cannot end its own element."""
    explained = roles.evidence.get("explained") or {}
    colors = colors_of(roles)
    heads: dict[str, Any] = {}
    for (layer, head), role in roles.for_display():
        share = explained.get(str(layer))
        title, meaning = describe_role(roles, (layer, head))
        entry: dict[str, Any] = {
            "layer": layer,
            "head": head,
            "title": title,
            "meaning": meaning,
            "entropy": role.entropy,
            "explained": share[head] if share else None,
            "shares": [[name, value, colors[name]] for name, value in role.shares.items()],
            "phrases": list(role.phrases),
        }
        if (layer, head) in evidence.heads:
            along, most, least = evidence.heads[layer, head]
            entry |= {
                "along": along,
                "most": [[seen.image, seen.score, seen.attention] for seen in most],
                "least": [[seen.image, seen.score, seen.attention] for seen in least],
            }
        heads[f"{layer}-{head}"] = entry
    data = {
        "side": evidence.side,
        "thumbnails": dict(evidence.thumbnails),
        "names": dict(evidence.names),
        "heads": heads,
    }
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
