"""The tables of docs/strong.md: DeAR's recipe `strong` on ten datasets beside zero-shot, `quick` and MMRL.

    python research/strong_table.py datasets
    python research/strong_table.py roles

Reads benchmarks/results: `strong_table.csv` (`dear_search.py` with `strong`, with changed options and with
changed roles on a CPU, a row per training and weight), `dear_search.csv` (variant "v100 f.02" is `strong`
with center = 0; means of seeds 1 and 2 on an H200) and `fair_table.csv` (the others). A mean counts every
training once.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean

RESULTS = Path(__file__).parent / "results"
REAL = ("Caltech101", "DescribableTextures", "EuroSAT", "OxfordPets")
WORLD = tuple(f"world:{name}" for name in ("textures", "scenes", "vehicles", "emblems", "fauna", "mixed"))
ROLES = ("uniform", "shuffled")
FIGURES = ("base", "novel", "hm", "joint")
OTHERS = {
    "zero-shot": ("zeroshot", "default"),
    "`quick`": ("dear@quick", "fused"),
    "MMRL, its authors' rule": ("mmrl", "auto"),
    "MMRL, fused": ("mmrl", "fused"),
}

Figures = tuple[float, ...]


def read(name: str) -> list[dict[str, str]]:
    """The rows of a file of results."""
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def numbers(row: dict[str, str]) -> Figures:
    """Base, novel, HM and joint in percent."""
    return tuple(100 * float(row[name]) for name in FIGURES)


def averaged(found: Sequence[Figures]) -> Figures:
    """The mean of each figure."""
    return tuple(map(mean, zip(*found, strict=True)))


def on_cpu(variant: str, dataset: str) -> dict[str, Figures]:
    """The fused answers of a variant by seed."""
    return {
        row["seed"]: numbers(row)
        for row in read("strong_table.csv")
        if (row["variant"], row["dataset"]) == (variant, dataset)
        and float(row["weight"]) == 0 == float(row["frozen"])
    }


def strong(dataset: str) -> list[Figures]:
    """Every training of `strong`."""
    return list(on_cpu("strong", dataset).values())


def nothing_learned(dataset: str) -> list[Figures]:
    """The frozen model less the mean of each training set."""
    return list(on_cpu("strong, nothing learned", dataset).values())


def not_centered(dataset: str) -> list[Figures]:
    """`strong` with center = 0: two seeds of the H200 where they were run there, the others on a CPU."""
    gpu = [
        numbers(row)
        for row in read("dear_search.csv")
        if (row["variant"], row["dataset"]) == ("v100 f.02", dataset) and float(row["weight"]) == 0
    ]
    cpu = on_cpu("center 0", dataset)
    return [*gpu, *gpu, *(own for seed, own in cpu.items() if not gpu or seed not in ("1", "2"))]


def datasets() -> None:
    """Rows of datasets, then the means of the world's and of the real ones."""
    fair = read("fair_table.csv")

    def of(method: str, mode: str) -> Callable[[str], list[Figures]]:
        return lambda dataset: [
            numbers(row)
            for row in fair
            if (row["method"], row["mode"], row["dataset"]) == (method, mode, dataset)
        ]

    columns: dict[str, Callable[[str], list[Figures]]] = {"**`strong`**": strong}
    columns |= {"`center` 0": not_centered, "zero-shot, centered": nothing_learned}
    columns |= {name: of(*key) for name, key in OTHERS.items()}
    print("| dataset | " + " | ".join(columns) + " |")
    print("|---|" + "---:|" * len(columns))
    for title, group in (("six world tasks", WORLD), ("four real datasets", REAL)):
        means: dict[str, list[Figures]] = {name: [] for name in columns}
        for dataset in group:
            cells = []
            for name, get in columns.items():
                if found := get(dataset):
                    means[name].append(averaged(found))
                cells.append(shown(averaged(found)) if found else "")
            count = len(strong(dataset))
            print(f"| {dataset.removeprefix('world:')} ({count}) | {' | '.join(cells)} |")
        cells = [shown(averaged(own)) if len(own) == len(group) else "" for own in means.values()]
        print(f"| **{title}** | {' | '.join(cells)} |")


def roles() -> None:
    """`strong` with the measured roles, with all heads mixed and with shuffled roles, on the same seeds."""
    rows = read("strong_table.csv")
    variants = [name for name in dict.fromkeys(row["variant"] for row in rows) if name.split(":")[0] in ROLES]
    tasks = [name for name in (*WORLD, *REAL) if any(on_cpu(variant, name) for variant in variants)]
    print("| roles | " + " | ".join(task.removeprefix("world:") for task in tasks) + " |")
    print("|---|" + "---:|" * len(tasks))
    for variant in ("strong", *variants):
        cells = []
        for task in tasks:
            seeds = {seed for other in variants for seed in on_cpu(other, task)}
            found = [own for seed, own in on_cpu(variant, task).items() if seed in seeds]
            cells.append(shown(averaged(found)) if found else "")
        print(f"| {'as measured' if variant == 'strong' else variant} | {' | '.join(cells)} |")


def shown(figures: Figures) -> str:
    """Base / novel / HM, joint."""
    base, novel, hm, joint = figures
    return f"{base:.1f} / {novel:.1f} / {hm:.1f}, {joint:.1f}"


def main() -> None:
    """Parse and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=("datasets", "roles"))
    {"datasets": datasets, "roles": roles}[parser.parse_args().table]()


if __name__ == "__main__":
    main()
