"""One page about the heads of a backbone: what each does, how that was found, and what it is worth.

The page is one file without any link to the outside: styles, script and images are inside it. Everything
that came from a user (phrases, class names, backbone names) is escaped, or set as text by the script.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from dear._io.files import write_atomic
from dear._io.progress import Progress
from dear.clip.model import Clip
from dear.heads.batches import Images
from dear.heads.names import KIND_TITLES, KINDS
from dear.heads.roles import RoleMap
from dear.report.page import POLICY
from dear.report.roles_data import Evidence, Key, gather
from dear.report.roles_sections import all_heads, colors_of, concepts, effects, role_title, the_map


def write_roles_page(
    roles: RoleMap,
    out: str | os.PathLike[str],
    clip: Clip | None = None,
    images: Images | None = None,
    heads: Sequence[Key] | None = None,
    limit: int = 1000,
    allow_other: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the page about `roles` to the file `out`.

    Args:
        roles: the map.
        out: the HTML file.
        clip: its backbone, and
        images: images, to show what excites each head, where it looks, and what ablating it costs.
        heads: heads whose images are shown; None for all.
        limit: most images looked at.
        allow_other: show the map on other weights than its own.
        progress: told about each stage.

    Raises:
        RoleError: the map belongs to other weights than `clip`'s.
    """
    if clip is not None:
        roles.check(clip, allow_other)
    write_atomic(out, render(roles, gather(roles, clip, images, heads, limit, progress=progress)))


def render(roles: RoleMap, evidence: Evidence | None = None) -> str:
    """The page as HTML text.

    >>> page = render(RoleMap.table2())
    >>> page.startswith("<!doctype html>"), "Photo taken in Namib Desert" in page
    (True, True)
    """
    evidence = evidence or Evidence()
    colors = colors_of(roles)
    title = escape(f"What the heads of {roles.backbone or 'this backbone'} do")
    sections = (
        the_map(roles, colors),
        concepts(roles, evidence, colors),
        effects(roles, evidence),
        all_heads(roles),
    )
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{_asset("roles_page.css")}</style></head>
<body>
<header><h1>{title}</h1>{_facts(roles)}</header>
<main>{"".join(sections)}</main>
{_provenance(roles)}
<script type="application/json" id="data">{_data(roles, evidence, colors)}</script>
<script>{_asset("roles_page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return resources.files("dear.report").joinpath(name).read_text(encoding="utf-8")


def _facts(roles: RoleMap) -> str:
    counts = roles.counts()
    told = ", ".join(f"{counts[kind]} {KIND_TITLES[kind]}" for kind in KINDS if counts[kind])
    by_concept = ", ".join(f"{concept} {number}" for concept, number in roles.concept_counts().items())
    core = f" Core heads by concept: {escape(by_concept)}." if by_concept else ""
    return f"<p>{len(roles)} heads in layers {', '.join(map(str, roles.layers))}: {escape(told)}.{core}</p>"


def _provenance(roles: RoleMap) -> str:
    corpus = roles.evidence.get("corpus") or {}
    parts = [f"rule {roles.rule} {json.dumps(dict(roles.parameters))}"]
    if roles.evidence.get("image_count"):
        source = roles.evidence.get("image_source") or "given images"
        parts.append(f"{int(roles.evidence['image_count']):,} images ({source})")
    if corpus:
        parts.append(f"{int(corpus.get('phrases', 0)):,} phrases (corpus {corpus.get('name')})")
    parts.append(f"weights {roles.fingerprint or 'not named'}")
    return f'<footer><p class="soft"><code>{escape("; ".join(parts))}</code></p></footer>'


def _data(roles: RoleMap, evidence: Evidence, colors: dict[str, str]) -> str:
    """What the script shows, as JSON that cannot end its own element."""
    explained = roles.evidence.get("explained") or {}
    heads: dict[str, Any] = {}
    for (layer, head), role in roles:
        share = explained.get(str(layer))
        entry: dict[str, Any] = {
            "layer": layer,
            "head": head,
            "title": role_title(role),
            "entropy": role.entropy,
            "explained": share[head] if share else None,
            "shares": [[name, value, colors[name]] for name, value in role.shares.items()],
            "phrases": list(role.phrases),
        }
        if (layer, head) in evidence.heads:
            along, most, least = evidence.heads[layer, head]
            entry |= {
                "along": along,
                "most": [[seen.image, seen.score, seen.gaze] for seen in most],
                "least": [[seen.image, seen.score, seen.gaze] for seen in least],
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
