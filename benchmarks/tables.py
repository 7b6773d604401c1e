"""Writes the tables of benchmarks/README.md from the files in benchmarks/results.

    python benchmarks/tables.py

Each table stands between `<!-- name -->` and `<!-- end -->`; the words around them are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from measure.script import markdown
from plots import rows

README = Path(__file__).parent / "README.md"


def step() -> str:
    """Step times on the GPU."""
    cells: dict[tuple[str, str], dict[str, dict[str, str]]] = {}
    for row in rows("step"):
        if "H200" in row["machine"]:
            cells.setdefault((row["batch"], row["classes"]), {})[row["step"]] = row
    body = []
    for (batch, classes), found in cells.items():
        ours, theirs, literal = found["dear"], found["mmrl++"], found["literal"]
        body.append(
            (
                batch,
                classes,
                *(f"{float(row['ms']):.2f}" for row in (theirs, literal, ours)),
                f"{float(ours['images_per_s']):,.0f}",
                f"{100 * float(ours['floor_share']):.0f}%",
                *(f"{int(row['peak_mb']):,}" for row in (theirs, literal, ours)),
            )
        )
    head = ("batch", "classes", "mmrl++ ms", "literal ms", "dear ms", "dear images/s", "of the floor")
    return markdown((*head, "mmrl++ MB", "literal MB", "dear MB"), body, 0)


def inference() -> str:
    """Images per second by model and batch, one table per machine and shape."""
    parts = []
    for device, shape in dict.fromkeys((row["machine"], row["shape"]) for row in rows("inference")):
        mine = [row for row in rows("inference") if (row["machine"], row["shape"]) == (device, shape)]
        batches = list(dict.fromkeys(row["batch"] for row in mine))
        models = list(dict.fromkeys(row["model"] for row in mine))
        rates = {(row["model"], row["batch"]): float(row["images_per_s"]) for row in mine}
        body = [(m, *(f"{rates[m, b]:,.1f}" if (m, b) in rates else "" for b in batches)) for m in models]
        words = f"{shape}, {device}, {mine[0]['threads']} threads, {mine[0]['precision']}"
        parts.append(
            f"{words}:\n\n" + markdown(("images per second", *(f"batch {b}" for b in batches)), body)
        )
    return "\n\n".join(parts)


def tasks() -> str:
    """Whole runs."""
    names = ["task", "base_classes", "training_images", "steps", "test_images", "train_s", "test_s", "run_s"]
    body = [tuple(row[name] for name in names) for row in rows("tasks")]
    return markdown(tuple(name.replace("_s", ", s").replace("_", " ") for name in names), body)


def losses() -> str:
    """Differences of the losses of 50 steps."""
    body = []
    for precision in dict.fromkeys(row["precision"] for row in rows("losses")):
        mine = [row for row in rows("losses") if row["precision"] == precision]
        worst = max(float(row["relative_difference"]) for row in mine)
        body.append((precision, str(len(mine)), mine[0]["ours"], mine[-1]["ours"], f"{worst:.1e}"))
    return markdown(("precision", "steps", "first loss", "last loss", "largest relative difference"), body)


def roles() -> str:
    """Role discovery."""
    body = []
    for row in rows("roles"):
        for name in ("text", "images", "textspan"):
            body.append((name, row[f"ours_{name}_s"], row[f"literal_{name}_s"]))
        body.append(("all", row["ours_s"], row["literal_s"]))
    return markdown(("stage", "ours, s", "literal, s"), body)


def images() -> str:
    """The data feed."""
    names = ("machine", "way", "epoch", "images", "images_per_s")
    body = [tuple(row[name] for name in names) for row in rows("images")]
    return markdown(tuple(name.replace("_per_s", " per second") for name in names), body, 2)


def cpu() -> str:
    """Steps on a CPU."""
    body = [
        (row["step"], row["batch"], row["classes"], row["precision"], row["ms"], row["literal_ratio"])
        for row in rows("step_cpu")
    ]
    return markdown(("step", "batch", "classes", "precision", "ms", "times faster than literal"), body)


def growth() -> str:
    """How a step grows."""
    body = []
    for row in rows("growth"):
        work = float(row["teraoperations"])
        rate = f"{work / float(row['ms']) * 1e6:.0f}"
        body.append((row["grows"], row[row["grows"]], f"{float(row['ms']):,.0f}", f"{work:.2f}", rate))
    return markdown(("what grows", "to", "ms per step", "10¹² operations", "10⁹ operations per second"), body)


def main() -> None:
    """Put every table in its place."""
    makers: tuple[Callable[[], str], ...] = (step, inference, tasks, losses, roles, images, cpu, growth)
    words = README.read_text(encoding="utf-8")
    for maker in makers:
        name = maker.__name__
        pattern = re.compile(rf"<!-- {name} -->.*?<!-- end -->", re.DOTALL)
        words, count = pattern.subn(lambda _: f"<!-- {name} -->\n{maker()}\n<!-- end -->", words)  # noqa: B023
        if count != 1:
            raise SystemExit(f"{README}: the place of the table {name} is missing")
    README.write_text(words, encoding="utf-8")


if __name__ == "__main__":
    main()
