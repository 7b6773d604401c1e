"""Transfer: train on one dataset, test on others (cross-dataset), or on its variants (domain shift)."""

from __future__ import annotations

from typing import Any

from dear.bench.session import Session

SOURCE = "ImageNet"
TARGETS = (
    "Caltech101", "OxfordPets", "StanfordCars", "OxfordFlowers", "Food101", "FGVCAircraft", "SUN397",
    "DescribableTextures", "EuroSAT", "UCF101",
)  # fmt: skip
VARIANTS = ("ImageNetV2", "ImageNetSketch", "ImageNetA", "ImageNetR")


def run(session: Session) -> dict[str, Any]:
    """Accuracy on the source and on each target, by mode and dataset.

    Each target is answered among exactly its own classes: of ImageNet's thousand, ImageNet-A and -R have
    two hundred, and an answer outside them would be wrong by definition. The image tower's work for a
    image is shared by the modes, a dataset's texts are encoded once.
    """
    method = session.fit(session.draw(session.open("train")), keep=True)
    modes: dict[str, dict[str, float | None]] = {mode: {} for mode in method.modes}
    for dataset in (session.cell.dataset, *session.cell.setting["targets"]):
        found = session.test(method, session.open("test", dataset))
        for mode, row in modes.items():
            row[dataset] = None if found is None else found[mode]
    return session.finish(modes)
