"""Writes docs/results/: every table of measurements, from its CSV file.

    python scripts/results.py

A table is the mean over everything that is not named in `rows` or `columns` (seeds, draws, repeats), with the number of
measurements; each names its command, machines, versions, dates, and the commit that last changed the CSV file.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "results"
BENCHMARKS, RESEARCH = "benchmarks/results", "research/results"


@dataclass(frozen=True)
class Table:
    """One table: which CSV file, what its rows and columns are, and the command that measured it."""

    title: str
    file: str  #: below the repository root
    command: str
    rows: tuple[str, ...]
    values: tuple[str, ...]
    columns: str | None = None  #: a column of the file whose values become columns; needs a single value
    where: str | None = None  #: a pandas query
    note: str = ""


def _accuracy(title: str, name: str, command: str, *, where: str | None = None, note: str = "") -> Table:
    values = ("base", "novel", "hm")
    return Table(
        title, f"{RESEARCH}/{name}.csv", command, ("dataset", "method", "mode"), values, None, where, note
    )


SMALL = "`SMALL` is the folder of a small CLIP (ViT-S/14, 112 pixels) trained on 121,000 photos."
TABLES: dict[str, tuple[str, tuple[Table, ...]]] = {
    "accuracy": (
        "Accuracy of methods",
        (
            _accuracy(
                "Base-to-novel, all methods", "fair_table",
                "python research/fair_table.py run --out fair --data-root DATA --small SMALL",
                note=SMALL,
            ),
            Table(
                "Few-shot on a small CLIP", f"{RESEARCH}/small_few_shot.csv",
                "dear bench few-shot --backbone SMALL", ("dataset", "method", "mode"), ("accuracy",), "shots",
                note=SMALL,
            ),
            Table(
                "Few images per class", f"{RESEARCH}/few_images.csv", "dear adapt --shots N",
                ("dataset", "draw", "method"), ("accuracy", "seconds"),
            ),
            Table(
                "Cross-dataset", f"{RESEARCH}/small_cross_dataset.csv", "dear bench cross-dataset --backbone SMALL",
                ("method", "mode"), ("accuracy",), "dataset",
            ),
            Table(
                "Recipe `strong` and its variants", f"{RESEARCH}/strong_table.csv", "python research/strong_table.py",
                ("variant", "dataset"), ("base", "novel", "hm", "joint"),
            ),
            Table(
                "Search for `strong`, first rounds", f"{RESEARCH}/dear_search.csv", "python research/dear_search.py",
                ("round", "variant"), ("base", "novel", "hm", "joint"),
            ),
            Table(
                "Ablations on mini", f"{RESEARCH}/mini_ablations.csv", "dear ablate",
                ("method", "changed", "roles", "mode"), ("base", "novel", "hm"),
            ),
            Table(
                "Training on a CPU: new views or a few fixed ones", f"{RESEARCH}/cpu_training.csv",
                "python research/cpu_training.py", ("dataset", "views", "precision"),
                ("training_cpu_s", "accuracy_fused", "accuracy_decoupled"),
            ),
        ),
    ),
    "domains": (
        "Head Purification and unseen domains",
        (
            Table(
                "PACS, small CLIP", f"{RESEARCH}/small_pacs.csv", "dear bench leave-one-domain-out --backbone SMALL",
                ("method", "changed", "mode"), ("target",), "held_out",
            ),
            Table(
                "world:domains, mini", f"{RESEARCH}/mini_domains.csv", "dear bench leave-one-domain-out",
                ("method", "changed", "mode"), ("target",), "held_out",
            ),
            Table(
                "Recipe `strong` of purification", f"{RESEARCH}/lodo_strong.csv", "dear bench leave-one-domain-out",
                ("dataset", "method", "changed"), ("target", "validation"),
            ),
            Table(
                "Search for purification", f"{RESEARCH}/purify_search.csv", "dear bench leave-one-domain-out",
                ("dataset", "stage", "changes"), ("target", "validation", "gate_sd"),
            ),
        ),
    ),
    "answers": (
        "Calibration, rejection, and choice of methods",
        (
            Table(
                "Calibration error, trained and new classes", f"{RESEARCH}/answers.csv",
                "python research/answers.py run --data-root DATA --small SMALL", ("dataset", "method", "mode"),
                ("trained_accuracy", "ece_trained_before", "ece_trained_after", "ece_trained_floor",
                 "ece_new_before", "ece_new_after"),
                note="`floor` is the error that a perfectly calibrated model shows on as many images.",
            ),
            Table(
                "Rejection", f"{RESEARCH}/refusals.csv", "python research/refusals.py --backbone SMALL",
                ("backbone", "task", "method"),
                ("refused", "low", "high", "near_auroc", "near_accepted", "far_auroc", "far_accepted"),
            ),
            Table(
                "What `dear choose` recommends", f"{RESEARCH}/answers_choose.csv", "python research/answers.py choose",
                ("dataset", "method"), ("cross_validated", "effort"),
            ),
            Table(
                "Wrong labels", f"{RESEARCH}/wrong_labels.csv", "python research/wrong_labels.py --backbone SMALL",
                ("data", "ranking"), ("average_precision", "auroc", "suspected", "found"),
            ),
        ),
    ),
    "shortcuts": (
        "Shortcuts: found and removed",
        (
            Table(
                "Worst group on planted shortcuts, mini", f"{RESEARCH}/shortcuts.csv",
                "python research/shortcuts.py repair", ("shortcut", "correlation", "method"), ("worst_group",), "way",
            ),
            Table(
                "Audit of planted shortcuts", f"{RESEARCH}/shortcuts_audit.csv", "python research/shortcuts.py audit",
                ("data", "planted", "verdict"), ("others_suspected",),
            ),
            Table(
                "Marks planted in photos", f"{RESEARCH}/shortcuts_photos.csv", "python research/shortcuts_photos.py find",
                ("dataset", "mark"), ("score", "findings"),
            ),
            Table(
                "Repair of marks in photos", f"{RESEARCH}/shortcuts_photos_repair.csv",
                "python research/shortcuts_photos.py repair", ("dataset", "mark", "chosen"),
                ("nothing_accuracy", "nothing_marked", "copies_accuracy", "copies_marked", "directions_accuracy",
                 "directions_marked", "random_marked", "clean_accuracy", "clean_marked"),
            ),
            Table(
                "Objects on textures and domains, small CLIP", f"{RESEARCH}/shortcuts_real.csv",
                "python research/shortcuts_real.py", ("task", "share", "way"), ("accuracy", "worst_group"),
            ),
        ),
    ),
    "heads": (
        "Roles, focus, explanations, retrieval",
        (
            Table(
                "Rules for roles against the known factors of mini", f"{RESEARCH}/roles_trials.csv",
                "python research/roles_trials.py", ("trial",), ("named", "right", "core", "core_right"),
            ),
            Table(
                "Focus on the heads of a role, mini", f"{RESEARCH}/focus.csv", "python research/focus.py",
                ("task", "focus", "images"), ("whole", "role", "role_alone", "random", "other_roles"),
            ),
            Table(
                "Focus chosen by cross-validation", f"{RESEARCH}/focus_auto.csv", "python research/focus.py auto",
                ("backbone", "task", "map", "images"), ("whole", "chosen"),
            ),
            Table(
                "Regions: masks of known objects", f"{RESEARCH}/explain_masks.csv", "python research/explain.py masks",
                ("question", "method"), ("auc", "energy", "pointing"),
            ),
            Table(
                "Regions: deletion and insertion on photos", f"{RESEARCH}/explain_photos.csv",
                "python research/explain.py photos --backbone SMALL", ("data", "method"), ("deletion", "insertion"),
            ),
            Table(
                "Retrieval by attribute", f"{RESEARCH}/retrieval.csv", "python research/retrieval.py",
                ("attribute",), ("by_heads", "whole_feature", "random_heads", "true_heads", "chance"),
            ),
        ),
    ),
    "speed": (
        "Speed",
        (
            Table(
                "Training step, ms", f"{BENCHMARKS}/step.csv", "python benchmarks/step.py --device cuda --mmrl MMRL",
                ("machine", "batch", "classes"), ("ms",), "step",
                note="Launching was slow in this run: the columns of MMRL++ and of the literal step are upper bounds.",
            ),
            Table(
                "Training step, measured again", f"{BENCHMARKS}/step_again.csv", "python benchmarks/step.py --device cuda",
                ("batch", "classes"), ("ms",), "step",
            ),
            Table(
                "Step of the presets, ms", f"{BENCHMARKS}/preset_step.csv", "python benchmarks/preset_step.py --device cuda",
                ("shape", "batch", "classes"), ("paper_ms", "quick_ms", "strong_ms", "strong_from_6_ms"),
            ),
            Table(
                "Inference, images per second", f"{BENCHMARKS}/inference.csv", "python benchmarks/inference.py",
                ("machine", "shape", "model"), ("images_per_s",), "batch",
            ),
            Table(
                "Images in", f"{BENCHMARKS}/images_in.csv", "python benchmarks/images_in.py",
                ("machine", "work", "way", "unit"), ("value",),
            ),
            Table("Whole tasks", f"{BENCHMARKS}/tasks.csv", "python benchmarks/tasks.py --device cuda",
                  ("task",), ("training_images", "steps", "train_s", "test_s", "run_s")),
            Table("Steps of every method, eager and recorded, ms", f"{RESEARCH}/recorded_steps.csv",
                  "python research/recorded_steps.py", ("method",), ("eager_ms", "step_ms")),
        ),
    ),
    "service": (
        "Service",
        (
            Table(
                "On a GPU", f"{BENCHMARKS}/serve_gpu.csv", "python benchmarks/serve_gpu.py",
                ("what", "server", "batch", "images", "in_flight"),
                ("images_per_s", "requests_per_s", "p50_ms", "of_engine"),
            ),
            Table(
                "HTTP on two cores", f"{BENCHMARKS}/serve_http_turns.csv", "python benchmarks/serve_overhead.py",
                ("server", "images", "in_flight"), ("images_per_s", "requests_per_s", "p50_ms", "p99_ms"),
            ),
            Table("Memory", f"{BENCHMARKS}/serve_memory.csv", "python benchmarks/serve.py memory",
                  ("backbone", "corrected", "adapters"), ("megabytes",)),
        ),
    ),
}  # fmt: skip


def render(table: Table) -> str:
    """The section of one table."""
    data = pd.read_csv(ROOT / table.file)
    if table.where is not None:
        data = data.query(table.where)
    keys = [name for name in table.rows if name in data]
    data[keys] = data[keys].astype("string").fillna("")
    values = [name for name in table.values if name in data]
    if table.columns is None:
        cells = data.groupby(keys, sort=False)[values].mean(numeric_only=True)
        cells["n"] = data.groupby(keys, sort=False).size()
    else:
        cells = data.pivot_table(values[0], keys, table.columns, "mean", sort=False)
        cells.columns = [str(name) for name in cells.columns]
    frame = cells.reset_index()
    for name in frame.columns:
        if name not in keys:
            frame[name] = frame[name].map(_number)
    parts = [f"## {table.title}", "", f"    {table.command}", ""]
    parts += [table.note, ""] if table.note else []
    return "\n".join(
        [*parts, frame.to_markdown(index=False, disable_numparse=True), "", _source(table, data), ""]
    )


def _number(value: float) -> str:
    if pd.isna(value):
        return ""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"


def _source(table: Table, data: pd.DataFrame) -> str:
    machine = next((name for name in ("machine", "hardware") if name in data), None)
    facts = []
    for label, name in (("machine", machine), ("PyTorch", "torch"), ("dear", "dear"), ("date", "date")):
        if name is not None and name in data:
            values = sorted(
                {str(value)[:10] if name == "date" else str(value) for value in data[name].dropna()}
            )
            shown = values if len(values) <= 3 else [values[0], "…", values[-1]]
            facts.append(f"{label}: {', '.join(shown)}")
    commit = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", table.file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return (
        f"*`{table.file}`{f' at {commit}' if commit else ''}; {len(data)} measurements; {'; '.join(facts)}.*"
    )


def main() -> None:
    """Write all pages."""
    PAGES.mkdir(parents=True, exist_ok=True)
    index = [
        "# Results",
        "",
        "Tables of measurements, generated from the CSV files by `python scripts/results.py`.",
        "",
    ]
    for name, (title, tables) in TABLES.items():
        body = "\n".join(render(table) for table in tables)
        (PAGES / f"{name}.md").write_text(f"# {title}\n\n{body}", encoding="utf-8")
        index.append(f"- [{title}]({name}.md)")
    (PAGES / "index.md").write_text("\n".join([*index, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
