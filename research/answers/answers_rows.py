"""Rows of research/answers/answers.py, from what models answered, and its tables."""

from __future__ import annotations

import csv
import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch
from measure.script import markdown, read
from torch import Tensor

from dear.calibration.calibration import (
    ModeCalibration,
    apply_scales,
    class_scales,
    threshold,
)
from dear.calibration.temperature import auroc
from dear.runs.evaluation import calibration_error
from dear.train.calibrate import fit_calibration


def hardware(device: str) -> str:
    """What a cell was computed on."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {'one thread' if threads == 1 else f'{threads} threads'}"


def ece(logits: Tensor, labels: Tensor) -> float:
    best = logits.softmax(dim=-1).max(dim=-1)
    return calibration_error(best.values, best.indices == labels)


def floor(logits: Tensor, draws: int = 50) -> float:
    """The mean error of a model that is right exactly as often as it says, on as many images."""
    sure, generator = logits.softmax(dim=-1).amax(dim=-1), torch.Generator().manual_seed(0)
    errors = [
        calibration_error(sure, torch.rand(len(sure), generator=generator) < sure) for _ in range(draws)
    ]
    return sum(errors) / draws


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(dim=1) == labels).double().mean())


def rows_of(task: Any, name: str, seed: int, stored: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per mode of a method, from what was answered."""
    fitted = fit_calibration(stored["held"], stored["left"], stored["open"], stored["folds"])
    facts = {
        "date": date.today().isoformat(),
        "hardware": stored.get("hardware", hardware("cpu")),
        "torch": stored.get("torch", torch.__version__),
        "backbone": task.clip.name,
        "dataset": task.name,
        "seed": seed,
        "method": name,
        "preset": stored["preset"],
    }
    times = {key: round(stored[key], 2) for key in ("train_s", "calibrate_s")}
    return [
        {**facts, "mode": mode, **_row(task, stored, mode, calibration), **times}
        for mode, calibration in fitted.modes.items()
    ]


def _row(task: Any, stored: dict[str, Any], mode: str, calibration: ModeCalibration) -> dict[str, Any]:
    limit = threshold(
        calibration.logits
    )  # by the logit alone; research/answers/unknown_images.py measures the whole score
    z, labels = stored["old"][0][mode], stored["old"][1]
    inside, outside = z / calibration.temperature, stored["outside"][mode] / calibration.temperature
    score, other = inside.amax(dim=-1), outside.amax(dim=-1)
    seen = limit.among(len(labels))
    row: dict[str, Any] = {
        "temperature": calibration.temperature,
        "trained_accuracy": accuracy(z, labels),
        "ece_trained_before": ece(z, labels),
        "ece_trained_after": ece(inside, labels),
        "ece_trained_floor": floor(inside),
        "refused": float((score < limit.value).double().mean()),
        "refused_low": limit.low,
        "refused_high": limit.high,
        "seen_low": seen[0],
        "seen_high": seen[1],
        "false_acceptance": float((other >= limit.value).double().mean()),
        "auroc": auroc(score, other),
    }
    if not stored["open"]:
        return row
    new_logits, new_labels = stored["new"][0][mode], stored["new"][1]
    scaled = apply_scales(new_logits, class_scales(calibration, [False] * len(task.novel)))
    row |= {
        "new_accuracy": accuracy(new_logits, new_labels),
        "ece_new_before": ece(new_logits, new_labels),
        "ece_new_after": ece(scaled, new_labels),
        "ece_new_floor": floor(scaled),
    }
    trained = [True] * len(task.base) + [False] * len(task.novel)
    scales = class_scales(calibration, trained)
    truth = torch.cat([labels, new_labels + len(task.base)])
    together = torch.cat([answers[mode] for answers in stored["both"]])
    for when, joint in (("before", together), ("after", apply_scales(together, scales))):
        a, b = (accuracy(joint[part], truth[part]) for part in (slice(len(labels)), slice(len(labels), None)))
        row |= {
            f"joint_old_{when}": a,
            f"joint_new_{when}": b,
            f"joint_hm_{when}": 2 * a * b / max(a + b, 1e-12),
            f"ece_all_{when}": ece(joint, truth),
        }
    return row


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to the CSV; columns that are new come last."""
    every = [*read(path), *rows]
    columns = list(dict.fromkeys(key for row in every for key in row))
    part = path.with_name(f"{path.name}.part")
    with part.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        for row in every:
            table.writerow({k: _short(v) for k, v in row.items()})
    part.replace(path)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return "" if value != value else f"{value:.4f}".rstrip("0").rstrip(".")
    return value


def show(answers: Path, choices: Path | None, fair: Path) -> None:
    """Tables in Markdown, in percent."""
    import pandas as pd

    table = pd.read_csv(answers)
    table["kind"] = ["world" if name.startswith("world:") else "real" for name in table.dataset]
    columns = [
        c
        for c in table.columns
        if c.startswith(("ece_", "joint_hm", "trained_acc", "new_acc"))
        or c in ("auroc", "refused", "false_acceptance")
    ]
    for kind, part in table.groupby("kind", sort=False):
        known = part.groupby(["method", "mode"], sort=False)
        means = (100 * known[columns].mean()).round(1)
        means.insert(0, "cells", known.size())
        print(f"\n{kind}: {', '.join(part.dataset.unique())}\n\n{_markdown(means.reset_index())}")
    for kind, words in (("seen", "for as many test images"), ("refused", "of the true share")):
        low, high = table[f"{kind}_low"], table[f"{kind}_high"]
        inside = (table.refused >= low - 1e-4) & (table.refused <= high + 1e-4)
        over = (table.refused > high + 1e-4).sum()
        share = f"{inside.sum()} of {len(table)} rows ({inside.mean():.0%})"
        print(f"\nrefused within the interval {words}: {share}, above it {over}")
    print(f"refused on average: {table.refused.mean():.1%}")
    if choices is not None and choices.exists():
        show_choices(pd.read_csv(choices), pd.read_csv(fair))


def _markdown(frame: Any) -> str:
    return markdown(list(frame), frame.to_numpy().tolist(), words=2)


def show_choices(runs: Any, fair: Any) -> None:
    """How good the picks of `dear choose` are on the test images, of two tables of pandas."""
    import pandas as pd

    usual = fair["mode"].isin(["default", "auto"]) | (
        (fair["method"] == "dear@strong") & (fair["mode"] == "fused")
    )
    fair = fair[usual]
    fair = fair.assign(method=fair.method.str.replace("dear@strong", "dear"))
    both = runs.merge(
        fair[["dataset", "seed", "method", "base", "novel"]], on=["dataset", "seed", "method"], how="left"
    )
    lines = []
    for (name, seed), group in both.groupby(["dataset", "seed"], sort=False):
        line = {"dataset": name, "seed": seed, "CPU s": group.choose_cpu_s.iloc[0]}
        for column, pick, best in (("base", "pick", "trained"), ("novel", "pick_for_new", "new")):
            recommended = group[group[pick]].iloc[0]
            top = group.loc[group[column].idxmax()]
            line |= {f"{best}: pick": recommended.method, f"{best}: best": top.method}
            line[f"{best}: loss"] = round(100 * (top[column] - recommended[column]), 1)
        line["not tried"] = ", ".join(group.method[group.cross_validated.isna()])
        lines.append(line)
    table = pd.DataFrame(lines)
    print(f"\n{_markdown(table)}\n")
    for best in ("trained", "new"):
        loss = table[f"{best}: loss"]
        print(
            f"dear choose, {best} classes: within one point of the best on the test images in "
            f"{(loss <= 1).sum()} of {len(loss)}; mean loss {loss.mean():.1f} points"
        )
