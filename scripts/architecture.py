"""Draws docs/images/architecture.svg from the real import graph; `make docs` runs it.

    python scripts/architecture.py

An arrow means "imports", inside functions too. Arrows that follow from others are left out (cli imports clip,
and by way of workflows as well), and so are those to `_io` and `errors`, which everything may import.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import grimp

DIAGRAM = Path(__file__).parents[1] / "docs" / "images" / "architecture.svg"
BASE = ("_io", "cluster", "errors")
# Where boxes stand, in three columns; a package that is missing here is an error, so that none is forgotten.
ROWS = (
    ("", "cli", ""),
    ("serve", "studio", ""),
    ("", "workflows", ""),
    ("bench", "", "export"),
    ("train", "", "report"),
    ("", "runs", ""),
    ("", "methods", "photos"),
    ("heads", "world", "data"),
    ("", "clip", ""),
    ("_io", "cluster", "errors"),
)
OWNS = {
    "cli": "commands and options",
    "serve": "HTTP service",
    "studio": "web page",
    "workflows": "one function per command",
    "photos": "images and their edits",
    "bench": "protocols, grids, tables",
    "export": "ONNX",
    "train": "fit: step, loop, resume",
    "runs": "specification, folder, Model",
    "report": "pages from facts",
    "methods": "one file per method",
    "heads": "contributions, roles, audit",
    "world": "attribute world, mini",
    "data": "folders, tables, benchmarks",
    "clip": "frozen towers, checkpoints",
    "_io": "files, schemas, images",
    "cluster": "Ray",
    "errors": "errors",
}
WIDTH, BOX, HEIGHT, GAP, STEP = 780, 190, 46, 36, 250


def packages() -> dict[str, set[str]]:
    """What each part of the package imports, imports for type checking aside."""
    graph = grimp.build_graph("dear", exclude_type_checking_imports=True, cache_dir=None)
    found: dict[str, set[str]] = {}
    for module in graph.modules:
        _, _, rest = module.partition(".")
        name = rest.partition(".")[0]
        if not name:
            continue  # dear/__init__.py offers names of all parts
        imported = {
            other.partition(".")[2].partition(".")[0]
            for other in graph.find_modules_directly_imported_by(module)
        }
        found.setdefault(name, set()).update(imported - {name, ""})
    return found


def reduced(edges: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The arrows that do not follow from others by way of the rows between; `BASE` aside."""
    row = {name: number for number, names in enumerate(ROWS) for name in names}

    def implied(start: str, goal: str) -> bool:
        between = [other for other in edges.get(start, ()) if row[start] < row[other] < row[goal]]
        return any(goal in edges.get(other, ()) or implied(other, goal) for other in between)

    return sorted(
        (name, other)
        for name, imports in edges.items()
        for other in imports
        if name not in BASE and other not in BASE and not implied(name, other)
    )


def diagram(edges: dict[str, set[str]]) -> str:
    """The graph as SVG."""
    unknown = sorted(
        (set(edges) | {o for e in edges.values() for o in e}) - {n for row in ROWS for n in row if n}
    )
    if unknown:
        raise SystemExit(f"scripts/architecture.py has no place for {', '.join(unknown)}; add it to ROWS")
    rows = [row for row in ROWS if any(name in edges for name in row)]
    at = {
        name: (WIDTH / 2 + (column - 1) * STEP, 10.0 + number * (HEIGHT + GAP))
        for number, row in enumerate(rows)
        for column, name in enumerate(row)
        if name in edges
    }
    height = 20 + len(rows) * (HEIGHT + GAP) - GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'role="img" aria-label="Packages of dear and what each imports">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="#55606e"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (name, other) in enumerate(reduced(edges)):
        parts.append(
            f'<path d="{_line(at[name], at[other], number % 5 * 9 - 18)}" fill="none" stroke="#55606e" '
            'stroke-width="1.4" marker-end="url(#tip)">'
            f"<title>{escape(name)} imports {escape(other)}</title></path>"
        )
    for name, (x, y) in at.items():
        fill = "#eef1f4" if name in BASE else "#dce9f7"
        parts += [
            f'<rect x="{x - BOX / 2:g}" y="{y:g}" width="{BOX}" height="{HEIGHT}" rx="7" fill="{fill}" '
            'stroke="#7d8fa3"/>',
            _text(x, y + 20, 15, "#14202c", f"dear.{name}"),
            _text(x, y + 37, 11.5, "#44505c", OWNS[name]),
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(start: tuple[float, float], end: tuple[float, float], shift: float) -> str:
    """The way of an arrow: sideways, to the next row, or down the gutter between two columns."""
    (x, y), (u, v) = start, end
    if y == v:
        sign = 1 if x < u else -1
        return f"M{x + sign * BOX / 2:g} {y + HEIGHT / 2 + sign * 6:g} H{u - sign * BOX / 2:g}"
    low, u = y + HEIGHT, u + shift
    if v - low <= GAP:
        return f"M{x + shift:g} {low:g} C{x + shift:g} {low + GAP / 2:g} {u:g} {low + GAP / 2:g} {u:g} {v:g}"
    gutter = (WIDTH - STEP) / 2 if min(x, end[0]) < WIDTH / 2 else (WIDTH + STEP) / 2
    gutter += shift
    return (
        f"M{x + shift:g} {low:g} C{x + shift:g} {low + GAP:g} {gutter:g} {low:g} {gutter:g} {low + GAP:g} "
        f"V{v - GAP:g} C{gutter:g} {v:g} {u:g} {v - GAP:g} {u:g} {v:g}"
    )


def _text(x: float, y: float, size: float, color: str, words: str) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="middle" font-size="{size}" fill="{color}">'
        f"{escape(words)}</text>"
    )


if __name__ == "__main__":
    DIAGRAM.write_text(diagram(packages()), encoding="utf-8")
    print(f"{DIAGRAM.name}: written")
