"""Wrong labels found in datasets with exchanged labels, compared with cleanlab on the same probabilities.

    python research/data/wrong_labels.py --backbone FOLDER --data pets.csv dtd.csv --out wrong_labels.csv

A share of the labels is exchanged at random. Average precision and AUROC of the ranking, and how many of the
labels that look wrong are: by `dear data check`, and by cleanlab's scores where it is installed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from measure.script import arguments, record
from sklearn.metrics import average_precision_score, roc_auc_score

import dear
from dear.data.open import open_data
from dear.runs.feature_cache import FeatureCache
from dear.train.label_check import out_of_sample, rank_labels


def main() -> None:
    options = arguments(
        __doc__,
        backbone="mini",
        data=["world:textures"],
        share=(0.06, "share of labels that is exchanged"),
        seeds=3,
        out=Path,
    )
    clip = dear.load(options.backbone)
    for name in options.data:
        images = open_data(name, "train")
        features = FeatureCache().image_features(clip, images)
        for seed in range(options.seeds):
            rows = measure(images.name, features, images.labels, len(images.classes), options.share, seed)
            record(options.out, [{**row, "backbone": clip.name} for row in rows], machine_last=True)


def measure(name: str, features: torch.Tensor, labels: torch.Tensor, classes: int, share: float, seed: int):
    generator = np.random.default_rng(seed)
    exchanged = labels.clone()
    chosen = torch.from_numpy(generator.choice(len(exchanged), int(share * len(exchanged)), replace=False))
    exchanged[chosen] = (
        exchanged[chosen] + torch.from_numpy(generator.integers(1, classes, len(chosen)))
    ) % classes
    wrong = (exchanged != labels).numpy()
    probabilities = out_of_sample(features, exchanged, classes)
    places, _ = rank_labels(probabilities, exchanged)
    scores = {"dear": -probabilities[np.arange(len(exchanged)), exchanged.numpy()]}
    try:
        from cleanlab.rank import get_label_quality_scores
    except ImportError:
        print("cleanlab is not installed: its rows are missing")
    else:
        for method in ("self_confidence", "normalized_margin"):
            scores[f"cleanlab {method}"] = -get_label_quality_scores(
                exchanged.numpy(), probabilities, method=method
            )
    for ranking, score in scores.items():
        is_dear = ranking == "dear"
        yield {
            "data": name,
            "seed": seed,
            "images": len(exchanged),
            "exchanged": int(wrong.sum()),
            "ranking": ranking,
            "average_precision": round(float(average_precision_score(wrong, score)), 4),
            "auroc": round(float(roc_auc_score(wrong, score)), 4),
            "suspected": len(places) if is_dear else "",
            "found": int(wrong[places].sum()) if is_dear else "",
        }


if __name__ == "__main__":
    main()
