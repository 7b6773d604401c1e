"""CleanVision and cleanlab on the same planted marks as `find`.

CleanVision (0.3.7) gives each image a score for dark, light, blurry, gray, odd aspect, odd size and low
information; cleanlab (2.9.0) asks how well a classifier tells the labels from each score, and reports a
property whose score is below 0.3 (`own rule`). Since that rule is about all classes at once, the same seven
scores are also judged as this audit judges its own properties: the marked class against the rest, from an
area under the ROC curve of 0.95 on (`scores`). Needs `pip install cleanvision cleanlab`.
"""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
from measure.script import where
from photo_sets import CLASSES, MOST, Photos
from plants import PLANTS, plant

from dear.shortcuts.find import LIMIT, auc
from dear.tasks.speed import add_rows

OWN_LIMIT = 0.3
SCORES = ("dark", "light", "blurry", "grayscale", "odd_aspect_ratio", "odd_size", "low_information")


def anchor(args: Any) -> None:
    """A row per draw."""
    rows = []
    for source in args.data:
        photos = Photos(source)
        for number, name in enumerate((*PLANTS, "none")):
            if args.marks and name not in args.marks:
                continue
            for seed in args.seeds:
                key = 99 if name == "none" else number
                drawn = photos.draw(CLASSES, MOST, np.random.default_rng((seed, key)))
                row = {"dataset": photos.name, "mark": name, "draw": seed, **_cell(photos, drawn, name, seed)}
                rows.append(row)
                add_rows(args.out, [row | where()])
                print(row, flush=True)


def _cell(photos: Photos, drawn: list[list[int]], name: str, seed: int) -> dict[str, object]:
    from cleanlab.datalab.internal.spurious_correlation import SpuriousCorrelations
    from cleanvision import Imagelab

    labels = np.array([label for label, places in enumerate(drawn) for _ in places])
    images = [photos.image(place) for places in drawn for place in places]
    if name != "none":
        images[: len(drawn[0])] = plant(name, images[: len(drawn[0])], seed)
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/{place:04d}.png" for place in range(len(images))]
        for path, image in zip(paths, images, strict=True):
            image.save(path, compress_level=1)
        lab = Imagelab(filepaths=paths, verbose=False)
        lab.find_issues({score: {} for score in SCORES}, n_jobs=1, verbose=False)
        issues = lab.issues.loc[paths]
    columns = [f"{score}_score" for score in SCORES]
    correlations = SpuriousCorrelations(issues[columns], labels).calculate_correlations()
    lowest = correlations.sort_values("score").iloc[0]
    areas = {score: auc(issues[f"{score}_score"].to_numpy(float), labels == 0) for score in SCORES}
    areas = {score: max(area, 1 - area) for score, area in areas.items()}
    best = max(areas, key=areas.__getitem__)
    return {
        "own_rule_property": str(lowest["property"]).removesuffix("_score"),
        "own_rule_score": round(float(lowest["score"]), 3),
        "own_rule_reports": int(float(lowest["score"]) < OWN_LIMIT),
        "best_score": best,
        "auc": round(areas[best], 3),
        "scores_report": int(areas[best] >= LIMIT),
    }
