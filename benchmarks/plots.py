"""Draws the plots of benchmarks/README.md from the tables in benchmarks/results.

    python benchmarks/plots.py

Written by hand: the images are SVG files of a few kilobytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from measure.script import read

HERE = Path(__file__).parent
COLORS = {"mmrl++": "#b3541e", "literal": "#8a8f98", "dear": "#1f6feb"}
PALETTE = ("#1f6feb", "#7aa7f0", "#8a8f98", "#c4a484", "#b3541e")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 340, 64, 150, 44, 48

Series = dict[str, list[tuple[float, float]]]


def rows(name: str) -> list[dict[str, str]]:
    """A table of results."""
    return read(HERE / "results" / f"{name}.csv")


def text(x: float, y: float, words: str, anchor: str = "middle", **more: str) -> str:
    """Words at a place."""
    extra = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def page(title: str, parts: Sequence[str], height: int = HEIGHT) -> str:
    """A whole image."""
    style = "text{font:13px system-ui,sans-serif;fill:#24292f}.t{font-weight:600;font-size:15px}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    body = "".join([text(LEFT, 24, title, "start", **{"class": "t"}), *parts])
    frame = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    return f"{head}<title>{escape(title)}</title><style>{style}</style>{frame}{body}</svg>\n"


def ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten within a range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]


def lines(title: str, series: Series, across: str, up: str, xs: Sequence[float]) -> str:
    """Lines over two logarithmic axes; names stand at their ends."""
    values = [y for points in series.values() for _, y in points]
    low, high = min(values) / 1.3, max(values) * 1.3

    def at(x: float, y: float) -> tuple[float, float]:
        right = (math.log(x) - math.log(xs[0])) / (math.log(xs[-1]) - math.log(xs[0]))
        above = (math.log(y) - math.log(low)) / (math.log(high) - math.log(low))
        return LEFT + right * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - above * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in ticks(low, high):
        y = at(xs[0], tick)[1]
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#d8dee4"/>')
        parts.append(text(LEFT - 8, y + 4, f"{tick:g}", "end"))
    parts += [text(at(x, low)[0], HEIGHT - BOTTOM + 18, f"{x:g}") for x in xs]
    for number, (name, points) in enumerate(series.items()):
        color = COLORS.get(name.split(",")[0], PALETTE[number % len(PALETTE)])
        path = "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in points)
        dashed = ' stroke-dasharray="6 4"' if "reported" in name else ""
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2.5"{dashed}/>')
        parts += [
            '<circle cx="{:.1f}" cy="{:.1f}" r="3.5" fill="{}"/>'.format(*at(*p), color) for p in points
        ]
        x, y = at(*points[-1])
        if x > WIDTH - RIGHT - 9:
            parts.append(text(x + 9, y + 4, name, "start", style=f"fill:{color}"))
        else:  # the line ends within the plot: its name stands below its beginning
            x, y = at(*points[0])
            parts.append(text(x + 6, y + 18, name, "start", style=f"fill:{color}"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, across))
    parts.append(text(LEFT - 50, TOP - 6, up, "start"))
    return page(title, parts)


def bars(title: str, values: Sequence[tuple[str, float, str, str]], label: float = 210) -> str:
    """Lying bars: (name, value, what to write, color)."""
    step, top = 28, 44
    height = top + step * len(values) + 14
    room = WIDTH - label - 110
    largest = max(value for _, value, _, _ in values)
    parts = []
    for number, (name, value, words, color) in enumerate(values):
        y = top + step * number
        wide = max(1.0, room * value / largest)
        parts.append(text(label - 8, y + 15, name, "end"))
        parts.append(f'<rect x="{label}" y="{y}" width="{wide:.1f}" height="20" rx="3" fill="{color}"/>')
        parts.append(text(label + wide + 8, y + 15, words, "start"))
    return page(title, parts, height)


def step_plot() -> str:
    """Step time by classes at batch 16."""
    found: Series = {}
    for row in rows("step"):
        if row["batch"] == "16" and "H200" in row["machine"]:
            found.setdefault(row["step"], []).append((float(row["classes"]), float(row["ms"])))
    for row in rows("mmrl_reported"):
        found.setdefault("mmrl++, reported", []).append((float(row["classes"]), float(row["ms"])))
    return lines(
        "One training step, batch 16, H200", found, "classes", "milliseconds", (10, 50, 100, 500, 1000)
    )


def batch_plot() -> str:
    """Our step time by batch."""
    found: Series = {}
    for row in rows("step"):
        if row["step"] == "dear" and "H200" in row["machine"] and int(row["classes"]) >= 100:
            name = f"dear, {row['classes']} classes"
            found.setdefault(name, []).append((float(row["batch"]), float(row["ms"])))
    return lines("Our step by batch and classes, H200", found, "images per step", "milliseconds", (4, 16, 32))


def inference_plot() -> str:
    """Images per second at batch 256."""
    values = []
    for row in rows("inference"):
        if (row["batch"], row["shape"]) == ("256", "ViT-B-16") and "H200" in row["machine"]:
            rate, own = float(row["images_per_s"]), row["model"].startswith("dear")
            values.append((row["model"], rate, f"{rate:,.0f}", PALETTE[0] if own else PALETTE[2]))
    return bars("Images per second, ViT-B/16, bfloat16, batch 256, H200", values)


def log_plot() -> str:
    """The step on its way."""
    values = [
        (row["version"], float(row["ms"]), f"{float(row['ms']):.1f} ms", PALETTE[0])
        for row in rows("step_log")
        if (row["batch"], row["classes"]) == ("16", "50") and "second" not in row["version"]
    ]
    return bars("One step on its way, batch 16, 50 classes, H200", values, 300)


def main() -> None:
    """Draw all plots."""
    folder = HERE / "plots"
    folder.mkdir(exist_ok=True)
    for draw in (step_plot, batch_plot, inference_plot, log_plot):
        (folder / f"{draw.__name__.removesuffix('_plot')}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
