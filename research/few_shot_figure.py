"""Draws docs/images/few-shot.svg, the paper's Figure 4 on our datasets, from rows of `grid.py`.

    python research/few_shot_figure.py

Mean accuracy over three seeds by images per class: means of photos and of world tasks, then every dataset.
Bars at the points of DeAR are the standard deviation over seeds. Methods without three seeds are left out.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

import pandas as pd
from grid import GROUPS, KEYS

ROOT = Path(__file__).parents[1]
ROWS = [ROOT / "research/results/grid.csv"]
METHODS = {
    "dear": ("DeAR (strong)", "#1f6feb", 2.6),
    "dear@quick": ("DeAR (quick)", "#7aa7f0", 1.4),
    "mmrl": ("MMRL", "#b3541e", 1.6),
    "promptsrc": ("PromptSRC", "#2e7d32", 1.6),
    "maple": ("MaPLe", "#e07b39", 1.4),
    "skip-tuning": ("SkipTuning", "#4aa3a2", 1.4),
    "clip-lora": ("CLIP-LoRA", "#a23b72", 1.4),
    "coop": ("CoOp", "#8a8f98", 1.4),
    "proker": ("ProKeR", "#8e44ad", 1.4),
    "tip-adapter-f": ("Tip-Adapter-F", "#c2a000", 1.4),
    "lp-plus-plus": ("LP++", "#d47fa6", 1.4),
    "linear-probe": ("Linear probe", "#c4a484", 1.4),
}
PHOTOS = ["Caltech101", "DescribableTextures", "EuroSAT", "OxfordPets"]
WORLD = [name for group in ("dev", "report") for name in GROUPS[group] if name.startswith("world:")]
DEVELOPMENT = GROUPS["dev"]
SHOTS = (1, 2, 4, 8, 16)
STRONG = "dear"
COLUMNS, WIDTH, HEIGHT, LEFT, TOP, GAP = 4, 232, 176, 34, 30, 14


def accuracies() -> pd.DataFrame:
    """A row per cell of the few-shot protocol, in the method's usual mode."""
    rows = pd.concat([pd.read_csv(path) for path in ROWS]).drop_duplicates(list(KEYS))
    rows = rows[(rows.protocol == "few-shot") & rows.method.isin([*METHODS, "zeroshot"])]
    seeds = rows.groupby(["method", "dataset", "shots"]).seed.transform("nunique")
    return rows[seeds == 3]


def panel(rows: pd.DataFrame, datasets: list[str], title: str, left: float, top: float) -> str:
    """One plot: the mean over datasets."""
    selected = rows[rows.dataset.isin(datasets)]
    means = selected.groupby(["method", "shots", "seed"]).accuracy.agg(["mean", "size"]).reset_index()
    means = means[means["size"] == len(datasets)]
    points = means.groupby(["method", "shots"])["mean"].agg(["mean", "std"])
    shown = points[points.index.get_level_values("method").isin([*METHODS])]
    low, high = math.floor(shown["mean"].min() / 5) * 5, math.ceil(shown["mean"].max() / 5) * 5
    right, bottom = left + WIDTH - LEFT - GAP, top + HEIGHT - TOP - 26

    def at(shots: float, value: float) -> tuple[float, float]:
        across = math.log2(shots) / math.log2(SHOTS[-1])
        return left + across * (right - left), bottom - (value - low) / (high - low) * (bottom - top)

    parts = [f'<text x="{left:.0f}" y="{top - 9:.0f}" class="t">{escape(title)}</text>']
    for value in range(low, high + 1, 5 if high - low <= 30 else 10):
        y = at(1, value)[1]
        parts.append(f'<path d="M{left:.0f} {y:.1f}H{right:.0f}" stroke="#e6e8eb"/>')
        parts.append(f'<text x="{left - 5:.0f}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    for shots in SHOTS:
        x = at(shots, low)[0]
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15:.0f}" text-anchor="middle">{shots}</text>')
    for method, (_, color, width) in reversed(METHODS.items()):
        if method not in points.index:
            continue
        line = points.loc[method]
        path = " ".join("{:.1f},{:.1f}".format(*at(s, v)) for s, v in line["mean"].items())
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>')
        for shots, (mean, spread) in line[["mean", "std"]].iterrows() if method == STRONG else ():
            (x, y), (_, over) = at(shots, mean), at(shots, mean + spread)
            parts.append(
                f'<path d="M{x:.1f} {over:.1f}V{2 * y - over:.1f}" stroke="{color}" stroke-width="1"/>'
            )
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{color}"/>')
    return "".join(parts)


def main() -> None:
    rows = accuracies()
    panels = [(PHOTOS, "Mean of four photo datasets"), (WORLD, "Mean of six world tasks")]
    panels += [([name], name + (" *" if name in DEVELOPMENT else "")) for name in (*PHOTOS, *WORLD)]
    lines = -(-len(panels) // COLUMNS)
    width, height = COLUMNS * WIDTH + GAP, lines * HEIGHT + 90
    parts = [
        panel(rows, datasets, title, LEFT + number % COLUMNS * WIDTH, TOP + number // COLUMNS * HEIGHT)
        for number, (datasets, title) in enumerate(panels)
    ]
    x, y = LEFT, lines * HEIGHT + 22
    present = set(rows.method)
    for method, (title, color, stroke) in METHODS.items():
        if method in present:
            if x + 38 + 7 * len(title) > width:
                x, y = LEFT, y + 20
            parts.append(f'<path d="M{x} {y - 4}h18" stroke="{color}" stroke-width="{stroke}"/>')
            parts.append(f'<text x="{x + 23}" y="{y}">{title}</text>')
            x += 38 + 7 * len(title)
    note = (
        "Accuracy in percent by images per class, three seeds. * Settings of DeAR were chosen on these sets."
    )
    parts.append(f'<text x="{LEFT}" y="{y + 26}">{note}</text>')
    style = "text{font:12px system-ui,sans-serif;fill:#24292f}.t{font-weight:600}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    frame = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    frame = f"<title>Accuracy by images per class</title><style>{style}</style>{frame}"
    (ROOT / "docs/images/few-shot.svg").write_text(head + frame + "".join(parts) + "</svg>\n")


if __name__ == "__main__":
    main()
